"""Optimizers, one file each, behind one protocol; their states, gradient clipping, and the learning rate of a step."""
