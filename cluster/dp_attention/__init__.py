"""Lockstep of data-parallel attention: ranks gather facts, compute one plan from them, and exchange rows by it."""
