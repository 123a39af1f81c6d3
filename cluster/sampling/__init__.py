"""The sampler: penalties and grammars, filters, keyed Gumbel noise, and the choice of tokens, also over sharded logits.
"""
