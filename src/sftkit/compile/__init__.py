"""torch.compile: the contract of a compiled step, the compiler's records, its cache on disk."""
