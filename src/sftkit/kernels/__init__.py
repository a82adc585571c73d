"""GPU kernels: FlashAttention as one operator, cross entropy in place."""
