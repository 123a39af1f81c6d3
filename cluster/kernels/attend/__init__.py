"""Attention over pages and windows, in C and Triton."""
