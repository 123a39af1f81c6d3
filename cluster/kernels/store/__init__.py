"""Stores of new cells into a KV pool, in Triton."""
