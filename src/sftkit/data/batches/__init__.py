"""From tokenized documents to the batches of every step: row shapes, packing, order, and each rank's share."""
