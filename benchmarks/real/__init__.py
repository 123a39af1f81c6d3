"""Compare Aerie with `transformers` on a real model: `python -m benchmarks.real --root DIR` or `make real`. The model,
Gemma-3 270M, is built outside the checkout.
"""
