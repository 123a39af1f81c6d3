"""JSON schemas as grammars. They are converted here in full: xgrammar's own conversion silently ignores many
keywords.
"""
