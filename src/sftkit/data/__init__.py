"""From records to batches of static shape, one way: reading, tokens with their loss mask, batches."""
