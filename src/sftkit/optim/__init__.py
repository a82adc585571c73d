"""Optimizers, their states, gradient clipping, and the learning rate of a step."""
