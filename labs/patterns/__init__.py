"""One small transformer through every layout of processes on this machine's CPU: what each rank holds, sends
and waits for."""
