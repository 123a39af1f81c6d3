"""One file per model family: how it writes tool calls, and how a grammar enforces that."""
