"""The class of transformers that loads each kind of model, by name. No torch."""

CAUSAL = "AutoModelForCausalLM"
