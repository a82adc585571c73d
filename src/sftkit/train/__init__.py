"""The one training loop, and the one assembly of a run."""
