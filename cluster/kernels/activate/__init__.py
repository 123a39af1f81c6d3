"""Gated activations, in C and Triton."""
