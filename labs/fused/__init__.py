"""Passes of a step as Triton kernels of our own, which are measured (benchmarks/h200_step/fused.yaml) but not used."""
