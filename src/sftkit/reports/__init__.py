"""Pages about runs. Reads the files of run directories and nothing else; no torch."""
