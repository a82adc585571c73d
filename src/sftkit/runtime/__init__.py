"""The process and the machine: ranks, signals, watchdog, random states, status; the run directory and its files."""
