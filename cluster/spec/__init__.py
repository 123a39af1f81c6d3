"""Tree speculation: draft, verify, compact, extend, and the step that strings them together."""
