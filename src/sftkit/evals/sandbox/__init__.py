"""Runs programs that a model wrote and judges them from outside: docs/evaluation.md says what its walls hold."""
