"""Anthropic's Messages API: its bodies as chat requests, its answers and its errors."""
