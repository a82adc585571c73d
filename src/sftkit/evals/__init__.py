"""Evaluate a model eagerly: validation loss, tasks, sample answers."""
