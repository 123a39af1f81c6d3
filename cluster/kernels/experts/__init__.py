"""Sorting of rows by expert and sums of expert outputs, in Triton."""
