"""Integers for the device. The host gathers named lists and sends them in one copy; on the device they are used by
name.
"""

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.device.transfers import copy_to_device


@dataclass(frozen=True, slots=True)
class StagedLists:
    """Named lists of 64-bit integers on the device. They follow each other in `integers`, each padded to a multiple of
    `alignment` integers; `lengths` are their lengths without padding, by name.
    """

    integers: Tensor
    lengths: dict[str, int]
    alignment: int = 1

    def lists(self) -> dict[str, Tensor]:
        """Return the lists by name, without padding, as views of `integers`."""
        padded_lists = self.integers.split_with_sizes(
            [round_up(length, self.alignment) for length in self.lengths.values()]
        )
        lists_with_lengths = zip(self.lengths.items(), padded_lists, strict=True)
        return {
            name: padded_list if self.alignment == 1 else padded_list[:length]
            for (name, length), padded_list in lists_with_lengths
        }

    def split_at(self, count: int) -> "tuple[StagedLists, StagedLists]":
        """Return the first `count` lists, and the rest."""
        all_lengths = list(self.lengths.items())
        first_lengths, other_lengths = dict(all_lengths[:count]), dict(all_lengths[count:])
        sizes = [
            sum(round_up(length, self.alignment) for length in list_lengths.values())
            for list_lengths in (first_lengths, other_lengths)
        ]
        first_words, other_words = self.integers.split_with_sizes(sizes)
        return StagedLists(first_words, first_lengths, self.alignment), StagedLists(
            other_words, other_lengths, self.alignment
        )


def round_up(length: int, alignment: int) -> int:
    """Round `length` up to a multiple of `alignment`."""
    return length + -length % alignment


class Staging:
    """Gathers named lists of 64-bit integers and sends them to the device as one tensor. On a GPU each list begins at a
    multiple of 16 bytes: Triton would compile a second kernel for pointers without this alignment.
    """

    def __init__(self, device: torch.device, alignment: int | None = None) -> None:
        self._device = device
        self._alignment = (2 if device.type == "cuda" else 1) if alignment is None else alignment
        self._integers: list[int] = []
        self._lengths: dict[str, int] = {}

    def add(self, name: str, integers: Iterable[int]) -> None:
        """Append the list `name`."""
        start = len(self._integers)
        self._integers += integers
        self._lengths[name] = len(self._integers) - start
        self._integers += [0] * (-len(self._integers) % self._alignment)

    def __len__(self) -> int:
        return len(self._lengths)

    def send(self) -> StagedLists:
        """Queue one copy to the device, and return the lists there."""
        return StagedLists(copy_to_device(int64_tensor(self._integers), self._device), self._lengths, self._alignment)


def int64_tensor(integers: list[int]) -> Tensor:
    """Return `torch.tensor(integers, dtype=torch.int64)`, in a tenth of the time."""
    return torch.frombuffer(array("q", integers), dtype=torch.int64) if integers else torch.zeros(0, dtype=torch.int64)


def bits_of(value: float) -> int:
    """Return the bits of a float64 as a 64-bit integer. On the device, `view(torch.float64)` gives the float back."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def float_of(bits: int) -> float:
    """Return the float64 with these bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
