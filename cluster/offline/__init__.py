"""A model in the caller's process, without a server and without Ray: `from cluster import LLM, SamplingParams`."""
