"""Unpatched third-party clients with a real server: `python -m tests.clients [NAME ...]`. Each prints its version."""
