"""Slices of tensors from files: numpy's own, no bytes but theirs, and through pinned buffers of a bounded size."""

import errno
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cluster.config import ConfigError
from cluster.distributed.mesh import Shard
from cluster.models import slices
from cluster.models.checkpoint import Checkpoint
from cluster.models.slices import PinnedBuffers, SliceReader
from tests.loading import context, load_target
from tests.tiny import target_folder

DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


def any_index(draw: random.Random, shape: tuple[int, ...]) -> tuple[slice | int, ...]:
    index: list[slice | int] = []
    for size in shape[: draw.randint(0, len(shape))]:
        start = draw.randrange(size)
        index.append(draw.choice([start, slice(None), slice(start, draw.randint(start, size + 2)), slice(start, None)]))
    return tuple(index)


class Event:
    """Stands for a CUDA event: a buffer is used again only after it was waited for."""

    waited = 0

    def synchronize(self) -> None:
        Event.waited += 1

    def record(self) -> None:
        pass


@pytest.mark.parametrize(("part", "short"), [(1 << 20, 64), (96, 64), (96, 1), (40, 1 << 20)])
@pytest.mark.parametrize("pinned", [False, True])
def test_slice_reader_equals_indexing_of_the_complete_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, short: int, pinned: bool
) -> None:
    monkeypatch.setattr(slices, "CHUNK_BYTES", part)
    monkeypatch.setattr(slices, "SHORT_PIECE_BYTES", short)
    draw, path, made = random.Random(part + short), tmp_path / "numbers", list[int]()

    def make(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    reader = SliceReader()
    if pinned:
        reader._buffers[torch.device("cpu")] = PinnedBuffers(torch.device("cpu"), make, Event)
    for round in range(40):
        dtype = draw.choice(DTYPES)
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 4)))
        given = torch.randint(0, 255, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8)
        before = draw.randrange(20)
        file = path.with_name(f"numbers-{round}")
        file.write_bytes(bytes(before) + given.numpy().tobytes())
        index = any_index(draw, shape)
        found = reader.read(file, before, shape, dtype, index)
        want = given.view(dtype).view(shape)[index]
        assert found.shape == want.shape and found.dtype == dtype
        assert torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (found, want)))  # NaN too
    reader.close()
    assert made == ([part] * slices.READ_THREADS if pinned else [])


def read_bytes(folder: str, part: Shard) -> tuple[int, int]:
    """Bytes asked of files for the target on one rank, and bytes that its tensors have on disk, scaled to its part."""
    counted = list[SliceReader]()
    original = SliceReader.close

    def close(reader: SliceReader) -> None:
        counted.append(reader)
        original(reader)

    SliceReader.close = close  # type: ignore[method-assign]
    try:
        load_target(folder, context(part=part))
    finally:
        SliceReader.close = original  # type: ignore[method-assign]
    whole = sum(stored.stop - stored.start for _, _, stored in Checkpoint(folder)._files.values())
    return sum(reader.nbytes for reader in counted), whole


def test_rank_reads_only_the_bytes_of_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target whose tensors but norms are all cut in two."""
    monkeypatch.setattr(slices, "SHORT_PIECE_BYTES", 1)  # the slices here are shorter than any of a real model
    folder = target_folder(vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2)
    whole, stored = read_bytes(folder, Shard())
    assert whole == stored
    norms = 4 * 32 * (2 * 2 + 1)
    for rank in range(2):
        half, _ = read_bytes(folder, Shard(rank, 2))
        assert half == (stored - norms) // 2 + norms


def test_truncated_weight_file_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"one": torch.zeros(100)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(300)
    with pytest.raises(ConfigError, match=r"model.safetensors' ends at byte 300, within a tensor; copy the file again"):
        checkpoint.tensor("one")


def test_disk_read_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"one": torch.zeros(100)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))

    def stale(*given: Any) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(slices.os, "preadv", stale)
    with pytest.raises(OSError, match=r"Stale file handle: '.*/model.safetensors'"):
        checkpoint.tensor("one")


def test_reading_to_a_device_uses_bounded_pinned_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of eighty parts at most one buffer for each thread is filled at a time."""
    monkeypatch.setattr(slices, "CHUNK_BYTES", 1000)
    save_file({"one": torch.arange(20_000)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    held: list[Any] = []
    checkpoint.reader._buffers[torch.device("cpu")] = PinnedBuffers(
        torch.device("cpu"), lambda size: held.append(size) or torch.empty(size, dtype=torch.uint8), Event
    )
    Event.waited = 0
    assert torch.equal(checkpoint.tensor("one"), torch.arange(20_000))
    assert sum(held) == slices.READ_THREADS * 1000
    assert Event.waited == 160
