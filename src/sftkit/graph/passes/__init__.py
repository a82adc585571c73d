"""What is done with a captured graph: the passes that graph.passes names, and what applies them in order."""
