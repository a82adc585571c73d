"""From a source to conversations, texts and pictures: find rows, read them, report faults in them. No torch."""
