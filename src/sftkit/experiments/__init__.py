"""Runs that are compared (the bench of the training step, the validation of compiling), and what the compiler makes
of a model."""
