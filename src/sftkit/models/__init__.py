"""Models and tokenizers: loading, structure, size, weights, float8, and the kinds of model that can be trained."""
