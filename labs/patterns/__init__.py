"""Run one small transformer in every layout of processes on this machine's CPU: what each rank holds, sends and
waits for.
"""
