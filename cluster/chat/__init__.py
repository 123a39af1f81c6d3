"""Reasoning and tool calls in each model family's format: parses the text of an output into events, for every API."""
