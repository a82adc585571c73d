"""Turn conversations and texts into tokens with their loss mask, and keep them on disk."""
