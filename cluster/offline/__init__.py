"""Offline inference in the caller's process, without server and Ray: `from cluster import LLM, SamplingParams`."""
