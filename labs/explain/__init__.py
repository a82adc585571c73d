"""What the compiler makes of a model, measured here and now: where its graph breaks, which module is to blame, which
kernels come out."""
