"""Runs that are compared, the bench of the training step and the validation of compiling; and what the compiler makes
of a model."""
