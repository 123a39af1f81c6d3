"""What is used of the FlashInfer library, and what its wrappers launch."""
