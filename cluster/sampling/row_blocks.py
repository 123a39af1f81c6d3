"""Rows in blocks, so that what is made for them on the way stays small."""

import torch

BLOCK = 1 << 22  # numbers that are worked on at once, as far as one request's rows allow
CACHED = 1 << 17  # the same on a CPU: about as many as its caches hold with what is made of them


def blocks(count: int, each: int, device: torch.device) -> list[slice]:
    """Cuts of `count` requests or rows, with `each` numbers, into blocks; one empty block if there are none."""
    size = min(BLOCK, CACHED) if device.type == "cpu" else BLOCK
    step = max(1, size // max(1, each))
    return [slice(start, min(count, start + step)) for start in range(0, max(1, count), step)]
