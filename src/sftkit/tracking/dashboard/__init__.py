"""What wandb and trackio are told of a run, and how it is laid out there. The files of a run do without."""
