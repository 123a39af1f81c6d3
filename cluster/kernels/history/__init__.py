"""The tokens of each request: appending what a step has committed, and finding what followed the last tokens before."""
