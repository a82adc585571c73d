"""What a run directory is: file names, who holds it, how far the run in it is, whether its checkpoints are whole."""
