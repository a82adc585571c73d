"""Laboratories around sftkit: runs that are compared (the bench of the training step, the validation of compiling), and
what the compiler makes of a model. They import sftkit; sftkit does not import them."""
