"""A run's model in the form in which others load it."""
