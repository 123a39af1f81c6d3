"""Programs of others, unpatched, against a real server: `python -m tests.clients [NAME ...]`; each says its version."""
