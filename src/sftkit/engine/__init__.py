"""Engines compute optimizer steps: the Engine protocol and its implementations."""
