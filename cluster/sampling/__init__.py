"""The sampler: penalties and grammars, filters, keyed Gumbel noise, choice of tokens, also over sharded logits."""
