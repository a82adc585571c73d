"""The run directory: names of its files, its lock, the status of its run, the integrity of its checkpoints."""
