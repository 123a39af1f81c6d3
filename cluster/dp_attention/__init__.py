"""Lockstep across data-parallel attention ranks: one gathered table, one plan, one exchange."""
