"""Anthropic's Messages API: its bodies, translated into chat requests, its answers and its errors."""
