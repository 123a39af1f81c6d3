"""Captured programs: a step is recorded once and replayed many times, as CUDA graphs on a GPU or as a tape on a CPU."""
