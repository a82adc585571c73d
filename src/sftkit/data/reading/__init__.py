"""Read conversations, texts and pictures from a source: find rows, read them, report faults in them. No torch."""
