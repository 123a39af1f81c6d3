"""A real model as a habit: `make real` builds a real Gemma-3 270M outside the checkout and compares Aerie with
`transformers` on it: `python -m benchmarks.real --root DIR`.
"""
