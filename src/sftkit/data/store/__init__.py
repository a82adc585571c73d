"""Tokenized sources on disk: shards, how they are filled, and what a run sees of them."""
