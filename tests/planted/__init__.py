"""Planted faults: small mistakes put into `cluster/` one at a time, each of which `make test` must find.

A test earns its place by what it finds. `faults/*.toml` lists the mistakes, `python -m tests.planted` plants them.
"""
