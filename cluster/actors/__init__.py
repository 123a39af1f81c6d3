"""The Ray side of an engine: shard actors, their placement, the gang that they form, and its request router."""
