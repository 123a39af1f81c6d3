"""Unpatched third-party clients with a real server: `python -m tests.serving.clients [NAME ...]`. Each prints its
version.
"""
