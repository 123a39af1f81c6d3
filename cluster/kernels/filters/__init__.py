"""One kernel, by language."""
