"""The keyed sampler: logits processing, filters, Gumbel noise, and the choice of tokens, also over sharded logits."""
