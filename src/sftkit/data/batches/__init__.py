"""Turn tokenized documents into the batches of every step: row shapes, packing, order, and each rank's share."""
