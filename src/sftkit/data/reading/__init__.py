"""From a source to conversations, texts and pictures: rows are found and read, and faults in them told. No torch."""
