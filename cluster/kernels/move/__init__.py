"""Moves of KV cells between the slots of a request, in Triton."""
