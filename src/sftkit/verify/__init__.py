"""Verify a run around any engine: gradients, first update, learning rates, norm, counts, bits."""
