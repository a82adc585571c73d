"""What is minimised: hidden states and a batch become named sums."""
