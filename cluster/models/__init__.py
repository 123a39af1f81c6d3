"""Target and draft models: layers, loading from checkpoints (quantised formats too), runners, registry."""
