"""What a model can do: validation loss, tasks, sample answers, on the eager model."""
