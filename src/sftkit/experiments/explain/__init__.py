"""What the compiler makes of a model: where it breaks, which module is to blame, which kernels come out. Measured here
and now."""
