"""Turn records into batches of static shape, one way: reading, tokens with their loss mask, batches."""
