"""Training of the demo pair: tokenizer, target and EAGLE-3 draft, from text that every CPython carries.

It does not import the engine: it writes checkpoints in published formats, and the engine reads them like any other.
"""
