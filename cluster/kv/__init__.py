"""KV cache of one rank: pages, slots, page table, radix tree, pools and memory budget. Knows nothing of models."""
