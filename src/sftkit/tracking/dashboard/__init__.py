"""What wandb gets of a run, and how it is laid out there. The files of a run need none of it."""
