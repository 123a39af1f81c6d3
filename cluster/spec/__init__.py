"""Tree speculation: draft, verify, compact, extend, and the step that runs them in order."""
