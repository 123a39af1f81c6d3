"""OpenAI's Responses API, stateless: its bodies as chat requests, and its answers."""
