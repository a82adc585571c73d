"""GPU memory: the plan of a run, the estimate behind it, and settings that save memory if the run does not fit."""
