"""Moves of KV cells within windows, in Triton."""
