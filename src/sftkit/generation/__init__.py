"""Text from a model: batched decoding with a cache."""
