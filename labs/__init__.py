"""Laboratories around sftkit: they compare runs (the bench of the training step, the validation of compiling) and
explain what the compiler does with a model. They import sftkit; sftkit does not import them.
"""
