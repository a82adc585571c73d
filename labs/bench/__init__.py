"""`make bench`: the training step measured through the project's own loop, each run in a process of its own."""
