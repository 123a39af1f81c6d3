"""Constrained output: grammar requests, their conversion, compiling, and token masks. Independent of the engine."""
