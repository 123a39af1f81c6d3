"""Attention by FlashInfer: the backend, its plans for each step, and the readers, which call FlashInfer's wrappers."""
