"""Thresholds of top_k, top_p and min_p, in Triton."""
