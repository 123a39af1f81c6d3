"""Schemas as seven generators write them, each in a file beside the program that printed it."""
