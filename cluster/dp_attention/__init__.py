"""Lockstep across data-parallel attention ranks: a gathered table of facts, the plan made of it, and the exchange."""
