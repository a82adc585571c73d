"""Explain what the compiler does with a model, measured on this machine: graph breaks, the guilty module, the
generated kernels.
"""
