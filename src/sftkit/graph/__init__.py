"""The graph engine: forward and backward of a micro-batch captured as one graph, sharded weights in it,
changed by passes."""
