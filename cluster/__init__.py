"""Aerie: EAGLE tree speculation on a Ray cluster, in lockstep across data-parallel attention ranks."""

__version__ = "0.1.0"
