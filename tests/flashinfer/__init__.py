"""Attention by FlashInfer, without a GPU: against its signatures, and by a stand-in that computes on a CPU."""
