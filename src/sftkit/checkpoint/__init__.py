"""Checkpoints: written in the background, verified by a manifest, resumed at any number of processes."""
