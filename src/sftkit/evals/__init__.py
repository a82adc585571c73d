"""Evaluation on the eager `orig_model`."""
