"""JSON schemas as grammars, written out in full here: xgrammar's own reading of them ignores much without a word."""
