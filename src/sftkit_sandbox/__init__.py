"""Run programs that a model wrote and grade them from outside: docs/evaluation.md lists the protections.

Imports the standard library only.
"""
