"""Parses the text of an output, in the format of its model family, into events: text, reasoning and tool calls. Every
API builds its answers from these events.
"""
