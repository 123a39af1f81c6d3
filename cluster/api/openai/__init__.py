"""The answers of OpenAI's Completions and Chat Completions APIs, and its Responses API."""
