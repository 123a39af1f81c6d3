"""Training of the demo pair: tokenizer, target and EAGLE-3 draft, from text that every CPython carries.

This package knows nothing of the engine: it writes checkpoints in the formats of the wild and the
engine reads them like any other.
"""
