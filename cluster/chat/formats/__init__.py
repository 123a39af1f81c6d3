"""One file per family: how it writes calls of tools, and what of that a grammar has to hold."""
