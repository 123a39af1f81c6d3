"""Sampling: penalties and grammars, filters, keyed Gumbel noise, the choice of tokens from whole or sharded logits."""
