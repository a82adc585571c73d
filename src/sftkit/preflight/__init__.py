"""Analyse what a run would learn and cost, before it uses a GPU."""
