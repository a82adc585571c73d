"""Pages about runs, made from the files of run directories, and the parts that every page is built of; no torch."""
