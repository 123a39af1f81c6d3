"""Locates the source checkout and the cache folder on this machine."""
