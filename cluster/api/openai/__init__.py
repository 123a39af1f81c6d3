"""OpenAI's APIs: answers of Completions and Chat Completions, and the Responses API."""
