"""OpenAI's Responses API without stored state: its bodies, translated into chat requests, and its answers."""
