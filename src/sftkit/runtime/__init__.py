"""The process and the machine: ranks, signals, watchdog, random states, the start of a run."""
