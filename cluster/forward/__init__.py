"""Running a model on a batch: the runner, its pool and backend, and the keyed sampler."""
