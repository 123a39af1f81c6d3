"""JSON schemas as grammars, converted here in full, because xgrammar's own conversion silently ignores many keywords."""
