"""Planted faults: small mistakes put into `cluster/` one at a time, each of which `make test` must find.

The faults show what the tests are worth. `faults/*.toml` lists the mistakes, `python -m tests.planted` plants them.
"""
