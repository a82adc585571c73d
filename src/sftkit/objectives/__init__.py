"""Objectives turn hidden states and a batch into named sums, one of which is minimised."""
