"""The passes over a captured graph that graph.passes names, and their application in order."""
