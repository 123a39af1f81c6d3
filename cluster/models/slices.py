"""Reads slices of tensors from files, with several threads, without reading the rest of the tensor.

On a CPU, bytes are read into the tensor itself. For a GPU, bytes go through a few pinned buffers, so the host needs
no memory for the whole slice. Files are not memory-mapped, so their pages do not count as memory of this process.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.config import ConfigError

Index = tuple[slice | int, ...]
CPU = torch.device("cpu")
CHUNK_BYTES = 8 << 20  # bytes that a thread reads at once; also the size of a pinned buffer
READ_THREADS = 4  # reading threads: enough to keep a disk, or copies from the page cache, busy
SHORT_PIECE_BYTES = (
    4096  # bytes; shorter pieces are read together with the bytes between them, which the disk reads anyway
)


class SliceRun(NamedTuple):
    """A run: `pieces` pieces of a slice, of `length` bytes each. In the file the first piece is at byte `start`, and
    each next piece begins `stride` bytes after the beginning of the one before. In the slice the pieces are contiguous
    from byte `offset` on.
    """

    start: int
    offset: int
    length: int
    pieces: int = 1
    stride: int = 0

    @property
    def span(self) -> int:
        """Return the number of bytes in the file from the first piece to the end of the last."""
        return (self.pieces - 1) * self.stride + self.length


def slice_runs(shape: tuple[int, ...], index: Index, itemsize: int) -> tuple[tuple[int, ...], Iterator[SliceRun]]:
    """Return the shape of the slice that `index` selects of a tensor of `shape`, and an iterator over the slice's runs.
    The `start` of a run is relative to the first byte of the tensor.
    """
    full_index = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds, result_shape = list[tuple[int, int]](), list[int]()
    for selector, size in zip(full_index, shape, strict=True):
        start, stop, _ = (
            slice(selector, selector + 1).indices(size) if isinstance(selector, int) else selector.indices(size)
        )
        bounds.append((start, max(start, stop)))
        result_shape += [] if isinstance(selector, int) else [max(0, stop - start)]
    # Dimensions from `split` on are selected whole, so each entry of dimension split - 1 is `inner_bytes` contiguous
    # bytes. A piece is the selected range of dimension split - 1. The entries of dimension split - 2 are the pieces of
    # a run, at distances of `stride`. Each entry of the earlier dimensions is a run of its own.
    split = len(shape)
    while split and bounds[split - 1] == (0, shape[split - 1]):
        split -= 1
    inner_bytes = prod(shape[split:]) * itemsize
    outer_bounds, last = bounds[: max(0, split - 1)], bounds[split - 1] if split else (0, 1)
    length = (last[1] - last[0]) * inner_bytes
    strides = [prod(shape[offset + 1 :]) * itemsize for offset in range(len(shape))]

    (first, stop), stride = (outer_bounds[-1], strides[len(outer_bounds) - 1]) if outer_bounds else ((0, 1), 0)

    def runs() -> Iterator[SliceRun]:
        offset, count = 0, stop - first
        for position in product(*(range(low, high) for low, high in outer_bounds[:-1])):
            start = (
                sum(i * stride_of_dim for i, stride_of_dim in zip(position, strides, strict=False))
                + first * stride
                + last[0] * inner_bytes
            )
            yield SliceRun(start, offset, length, count, stride)
            offset += count * length

    return tuple(result_shape), runs()


class PinnedBuffers:
    """A few pinned buffers through which bytes go to a device; a buffer is reused when the device has read it."""

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        make_event: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._device = device
        self._free: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
        for _ in range(READ_THREADS):
            self._free.put((allocate(CHUNK_BYTES), make_event()))

    def send(self, fill: Callable[[memoryview], None], destination: Tensor) -> None:
        """Let `fill` write bytes into a free buffer, and copy them to `destination` on the device, which has at most
        `CHUNK_BYTES` bytes. Wait if no buffer is free.
        """
        buffer, copied = self._free.get()
        try:
            copied.synchronize()
            fill(memory_of(buffer)[: destination.numel()])
            destination.copy_(buffer[: destination.numel()], non_blocking=True)
            copied.record(*((torch.cuda.current_stream(destination.device),) if destination.is_cuda else ()))
        finally:
            self._free.put((buffer, copied))


class SliceReader:
    """Reads slices of tensors; `nbytes` counts the bytes requested from files."""

    def __init__(self, make_buffers: Callable[[torch.device], PinnedBuffers] = PinnedBuffers) -> None:
        self.nbytes = 0
        self._count_lock = Lock()
        self._files: dict[Path, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._make_buffers, self._buffers = make_buffers, dict[torch.device, PinnedBuffers]()

    def read(
        self,
        path: Path,
        start: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        index: Index = (),
        device: torch.device | None = None,
    ) -> Tensor:
        """Return what `index` selects of the tensor that begins at byte `start` of a file, on `device` (None: the CPU).

        Raises:
            ConfigError: the file ends before the slice does.
        """
        result_shape, runs = slice_runs(shape, index, dtype.itemsize)
        device = CPU if device is None else device
        num_bytes = prod(result_shape) * dtype.itemsize
        raw = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if device.type != "cpu" and device not in self._buffers:
            self._buffers[device] = self._make_buffers(device)
        if num_bytes:
            descriptor = self._open(path)
            chunks = _chunks([run._replace(start=run.start + start) for run in runs])
            if num_bytes <= CHUNK_BYTES:
                for chunk in chunks:
                    self._fill(path, descriptor, chunk, raw, device)
            else:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(READ_THREADS, "aerie-load")
                for future in [self._pool.submit(self._fill, path, descriptor, chunk, raw, device) for chunk in chunks]:
                    future.result()
        return raw.view(dtype).view(result_shape)

    def close(self) -> None:
        """Close the files, stop the threads and free the buffers."""
        if self._pool is not None:
            self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._pool = None
        self._files.clear()
        self._buffers.clear()

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def _fill(self, path: Path, descriptor: int, chunk: list[SliceRun], raw: Tensor, device: torch.device) -> None:
        """Read the runs of a chunk, which are contiguous in the slice, to their place in `raw`."""
        begin, end = chunk[0].offset, chunk[-1].offset + chunk[-1].pieces * chunk[-1].length

        def fill(view: memoryview) -> None:
            for run in chunk:
                destination = view[run.offset - begin :][: run.pieces * run.length]
                if run.pieces == 1:
                    self._read(path, descriptor, run.start, destination)
                    continue
                # Short pieces: read the whole span, then copy the pieces out of it.
                span_bytes = torch.empty(run.span, dtype=torch.uint8, device=CPU)
                self._read(path, descriptor, run.start, memory_of(span_bytes))
                pieces = span_bytes.as_strided((run.pieces, run.length), (run.stride, 1))
                torch.frombuffer(destination, dtype=torch.uint8).view(run.pieces, run.length).copy_(pieces)

        if (buffers := self._buffers.get(device)) is not None:
            buffers.send(fill, raw[begin:end])
        else:
            fill(memory_of(raw)[begin:end])

    def _read(self, path: Path, descriptor: int, start: int, view: memoryview) -> None:
        with self._count_lock:
            self.nbytes += len(view)
        bytes_read = 0
        while bytes_read < len(view):
            try:
                count = os.preadv(descriptor, [view[bytes_read:]], start + bytes_read)
            except OSError as error:  # such as a failing network file system
                raise OSError(error.errno, error.strerror, str(path)) from None
            if not count:
                raise ConfigError(
                    f"{str(path)!r} ends at byte {start + bytes_read}, within a tensor; copy the file again"
                )
            bytes_read += count


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a uint8 tensor on the CPU."""
    array: Any = tensor.numpy()
    return memoryview(array)


def _chunks(runs: list[SliceRun]) -> Iterator[list[SliceRun]]:
    """Cut and group runs into chunks of at most `CHUNK_BYTES` bytes of the slice. A run of several short pieces is not
    grouped with others; it is cut into chunks whose span in the file is at most `CHUNK_BYTES` bytes.
    """
    chunk: list[SliceRun] = []
    for run in runs:
        if run.pieces > 1 and run.length < SHORT_PIECE_BYTES and run.length <= CHUNK_BYTES:
            if chunk:
                yield chunk
            # (pieces_per_chunk - 1) * stride + length <= CHUNK_BYTES
            chunk, pieces_per_chunk = [], (CHUNK_BYTES - run.length) // run.stride + 1
            for i in range(0, run.pieces, pieces_per_chunk):
                start, offset = run.start + i * run.stride, run.offset + i * run.length
                yield [run._replace(start=start, offset=offset, pieces=min(pieces_per_chunk, run.pieces - i))]
            continue
        for i, start_in_piece in product(range(run.pieces), range(0, run.length, CHUNK_BYTES)):
            offset, length = run.offset + i * run.length + start_in_piece, min(CHUNK_BYTES, run.length - start_in_piece)
            if chunk and offset + length - chunk[0].offset > CHUNK_BYTES:
                yield chunk
                chunk = []
            chunk.append(SliceRun(run.start + i * run.stride + start_in_piece, offset, length))
    if chunk:
        yield chunk
