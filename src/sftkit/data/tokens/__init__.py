"""From conversations and texts to tokens, and which of them are targets; kept on disk."""
