"""The best tokens of rows of logits, with keyed noise, in C and Triton."""
