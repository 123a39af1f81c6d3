"""Pages, slots, the radix tree and the byte budget; knows nothing of models."""
