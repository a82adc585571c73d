"""What a run would learn and cost, before a GPU is used."""
