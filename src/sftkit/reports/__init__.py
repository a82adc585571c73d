"""Pages about runs, made from the files of run directories and nothing else; no torch."""
