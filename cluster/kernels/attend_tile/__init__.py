"""One tile of attention, in Triton."""
