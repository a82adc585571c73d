"""From records to batches of static shape: reading, tokenizing, the loss mask, packing, collating. Pure and one-way."""
