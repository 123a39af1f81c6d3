"""Stores of new cells (the K and V of one token in one layer) into a KV pool, in Triton."""
