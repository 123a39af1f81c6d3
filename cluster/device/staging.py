"""Integers for the device: named lists that the host gathers, sends in one copy, and reads on the device by name."""

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.device.transfers import brought


@dataclass(frozen=True, slots=True)
class Sent:
    """Named lists of 64-bit integers on the device. They follow each other in `words`, each padded to a multiple of
    `each` integers; `lengths` are their lengths without padding, by name.
    """

    words: Tensor
    lengths: dict[str, int]
    each: int = 1

    def lists(self) -> dict[str, Tensor]:
        """Return the lists by name, without padding, as views of `words`."""
        parts = self.words.split_with_sizes([padded(length, self.each) for length in self.lengths.values()])
        named = zip(self.lengths.items(), parts, strict=True)
        return {name: part if self.each == 1 else part[:length] for (name, length), part in named}

    def cut(self, lists: int) -> "tuple[Sent, Sent]":
        """Return the first `lists` lists, and the rest."""
        pairs = list(self.lengths.items())
        first, others = dict(pairs[:lists]), dict(pairs[lists:])
        sizes = [sum(padded(length, self.each) for length in part.values()) for part in (first, others)]
        words, rest = self.words.split_with_sizes(sizes)
        return Sent(words, first, self.each), Sent(rest, others, self.each)


def padded(length: int, each: int) -> int:
    """Round `length` up to a multiple of `each`."""
    return length + -length % each


class Staging:
    """Gathers named lists of 64-bit integers and sends them to the device as one tensor. On a GPU each list begins at a
    multiple of 16 bytes: Triton would compile a second kernel for pointers without this alignment.
    """

    def __init__(self, device: torch.device, each: int | None = None) -> None:
        self._device = device
        self._each = (2 if device.type == "cuda" else 1) if each is None else each
        self._words: list[int] = []
        self._lengths: dict[str, int] = {}

    def add(self, name: str, words: Iterable[int]) -> None:
        """Append a list."""
        start = len(self._words)
        self._words += words
        self._lengths[name] = len(self._words) - start
        self._words += [0] * (-len(self._words) % self._each)

    def __len__(self) -> int:
        return len(self._lengths)

    def sent(self) -> Sent:
        """Queue one copy to the device, and return the lists there."""
        return Sent(brought(int64(self._words), self._device), self._lengths, self._each)


def int64(words: list[int]) -> Tensor:
    """Return `torch.tensor(words, dtype=torch.int64)`, in a tenth of the time."""
    return torch.frombuffer(array("q", words), dtype=torch.int64) if words else torch.zeros(0, dtype=torch.int64)


def bits_of(value: float) -> int:
    """Return the bits of a float64 as a 64-bit integer; on the device, `view(torch.float64)` turns them back."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def float_of(bits: int) -> float:
    """Return the float64 with these bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
