"""Norm and rotation of query and key heads, in C and Triton."""
