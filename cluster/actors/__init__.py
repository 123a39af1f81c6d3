"""The engine-side Ray files: shards, placement, gang, router."""
