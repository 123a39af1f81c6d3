"""Training of the demo pair: tokenizer, target and EAGLE-3 draft, on the source code that every CPython ships with.

This package does not import the engine. It writes checkpoints in published formats, which the engine can read.
"""
