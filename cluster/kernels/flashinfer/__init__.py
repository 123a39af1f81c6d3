"""The parts of FlashInfer that are used, and the launch arguments of its wrappers."""
