"""What a run directory is: names of its files, who holds it, how far the run in it is, whether its checkpoints are whole."""
