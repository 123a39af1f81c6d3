"""Rows in blocks, so that what is made for them on the way stays small."""

from collections.abc import Iterator

BLOCK = 1 << 22  # numbers that are worked on at once, as far as one request's rows allow


def blocks(count: int, each: int) -> Iterator[slice]:
    """Cuts of `count` requests or rows, with `each` numbers, into blocks; one empty block if there are none."""
    step = max(1, BLOCK // max(1, each))
    for start in range(0, max(1, count), step):
        yield slice(start, min(count, start + step))
