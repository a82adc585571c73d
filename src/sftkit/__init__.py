"""sftkit: base, mid-training and chat SFT of causal language models with a compiled, measured train step."""

__version__ = "0.1.0"
