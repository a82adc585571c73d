"""What is minimised: objectives turn hidden states and a batch into named sums."""
