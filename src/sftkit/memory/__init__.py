"""Where the memory of a GPU goes: the plan of a run, the estimate behind it, what to change when it does not fit."""
