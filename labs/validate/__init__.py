"""Validate whether compiling a recipe makes it faster without changing its results: real runs, judged criterion
by criterion.
"""
