"""`make bench`: measure the training step through the project's own loop, each run in a separate process."""
