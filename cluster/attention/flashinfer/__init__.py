"""Attention by FlashInfer: the backend, its plans for each step, and how its wrappers read pages."""
