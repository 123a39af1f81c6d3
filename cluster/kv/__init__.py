"""KV cache of one rank: pages, slots, page table, radix tree, pools and memory budget. It does not use the models."""
