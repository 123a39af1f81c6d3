"""Folders on this machine: the source checkout and the cache."""
