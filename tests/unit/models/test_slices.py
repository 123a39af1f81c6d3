"""Slices of tensors from files: they equal indexing, the reader reads only their bytes, pinned buffers are bounded."""

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
from tests.support.loading import context, load_target
from tests.support.tiny_checkpoints import target_folder

DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


def random_index(rng: random.Random, shape: tuple[int, ...]) -> tuple[slice | int, ...]:
    index: list[slice | int] = []
    for size in shape[: rng.randint(0, len(shape))]:
        start = rng.randrange(size)
        index.append(rng.choice([start, slice(None), slice(start, rng.randint(start, size + 2)), slice(start, None)]))
    return tuple(index)


class FakeEvent:
    """A fake CUDA event that counts the waits. The reader waits for a buffer's event before it reuses the buffer."""

    wait_count = 0

    def synchronize(self) -> None:
        FakeEvent.wait_count += 1

    def record(self) -> None:
        pass


@pytest.mark.parametrize(("chunk_bytes", "short_piece_bytes"), [(1 << 20, 64), (96, 64), (96, 1), (40, 1 << 20)])
@pytest.mark.parametrize("pinned", [False, True])
def test_slice_reader_equals_indexing_of_the_complete_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, short_piece_bytes: int, pinned: bool
) -> None:
    monkeypatch.setattr(slices, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(slices, "SHORT_PIECE_BYTES", short_piece_bytes)
    rng, path, buffer_sizes = random.Random(chunk_bytes + short_piece_bytes), tmp_path / "numbers", list[int]()

    def allocate(size: int) -> torch.Tensor:
        buffer_sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    reader = SliceReader()
    if pinned:
        reader._buffers[torch.device("cpu")] = PinnedBuffers(torch.device("cpu"), allocate, FakeEvent)
    for round in range(40):
        dtype = rng.choice(DTYPES)
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))
        stored_bytes = torch.randint(0, 255, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8)
        offset = rng.randrange(20)
        file = path.with_name(f"numbers-{round}")
        file.write_bytes(bytes(offset) + stored_bytes.numpy().tobytes())
        index = random_index(rng, shape)
        read_slice = reader.read(file, offset, shape, dtype, index)
        expected = stored_bytes.view(dtype).view(shape)[index]
        assert read_slice.shape == expected.shape and read_slice.dtype == dtype
        assert torch.equal(
            *(each.contiguous().view(-1).view(torch.uint8) for each in (read_slice, expected))
        )  # NaN too
    reader.close()
    assert buffer_sizes == ([chunk_bytes] * slices.READ_THREADS if pinned else [])


def read_bytes(folder: str, shard: Shard) -> tuple[int, int]:
    """Load the target of one rank; return the bytes read from files, and the bytes of all its tensors on disk."""
    closed_readers = list[SliceReader]()
    original = SliceReader.close

    def close(reader: SliceReader) -> None:
        closed_readers.append(reader)
        original(reader)

    SliceReader.close = close  # type: ignore[method-assign]
    try:
        load_target(folder, context(shard=shard))
    finally:
        SliceReader.close = original  # type: ignore[method-assign]
    total_bytes = sum(stored.stop - stored.start for _, _, stored in Checkpoint(folder)._files.values())
    return sum(reader.nbytes for reader in closed_readers), total_bytes


def test_rank_reads_only_the_bytes_of_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share the target: all its tensors except the norms are cut in two."""
    monkeypatch.setattr(slices, "SHORT_PIECE_BYTES", 1)  # the slices here are shorter than any of a real model
    folder = target_folder(vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2)
    bytes_read, bytes_stored = read_bytes(folder, Shard())
    assert bytes_read == bytes_stored
    norm_bytes = 4 * 32 * (2 * 2 + 1)
    for rank in range(2):
        shard_bytes, _ = read_bytes(folder, Shard(rank, 2))
        assert shard_bytes == (bytes_stored - norm_bytes) // 2 + norm_bytes


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

    def raise_stale(*arguments: Any) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(slices.os, "preadv", raise_stale)
    with pytest.raises(OSError, match=r"Stale file handle: '.*/model.safetensors'"):
        checkpoint.tensor("one")


def test_reading_to_a_device_uses_bounded_pinned_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader needs one buffer per thread for a tensor of 160 chunks."""
    monkeypatch.setattr(slices, "CHUNK_BYTES", 1000)
    save_file({"one": torch.arange(20_000)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    buffer_sizes: list[Any] = []
    checkpoint.reader._buffers[torch.device("cpu")] = PinnedBuffers(
        torch.device("cpu"), lambda size: buffer_sizes.append(size) or torch.empty(size, dtype=torch.uint8), FakeEvent
    )
    FakeEvent.wait_count = 0
    assert torch.equal(checkpoint.tensor("one"), torch.arange(20_000))
    assert sum(buffer_sizes) == slices.READ_THREADS * 1000
    assert FakeEvent.wait_count == 160
