"""Starting scripts on the hardware that is there, and the chain of all stages. No torch."""
