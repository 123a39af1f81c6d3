"""JSON schemas as grammars, converted here in full: xgrammar's own conversion silently ignores many keywords."""
