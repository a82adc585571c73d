"""What a run proves of itself besides its gradients, around any engine: the first update, rates, norm, counts, bits."""
