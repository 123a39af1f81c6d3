"""Captured programs: a step is recorded once and replayed, as CUDA graphs or as a tape on a CPU."""
