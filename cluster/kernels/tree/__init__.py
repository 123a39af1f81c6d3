"""Growth of draft trees, in Triton."""
