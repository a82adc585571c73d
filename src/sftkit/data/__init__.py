"""Data: from files and hub datasets to batches of declared shape. Torch on CPU only; no model, no Accelerate."""
