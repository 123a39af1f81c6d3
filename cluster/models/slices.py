"""Reading slices of tensors from files, by several threads, without reading the rest of the tensor.

On a CPU, bytes are read into the tensor itself. For a GPU, bytes go through a few pinned buffers, so the host never
holds more than these buffers. Files are not memory-mapped, so their pages do not count as memory of this process.
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
PART = 8 << 20  # bytes that a thread reads at once; also the size of a pinned buffer
THREADS = 4  # reading threads: enough to keep a disk, or copies from the page cache, busy
SHORT = 4096  # bytes; shorter pieces are read together with the bytes between them, which the disk reads anyway


class SliceRun(NamedTuple):
    """`pieces` pieces of a slice, of `length` bytes each. In the file the first piece is at byte `start`, and the next
    ones follow at distances of `stride` bytes. In the slice the pieces are contiguous from byte `at` on.
    """

    start: int
    at: int
    length: int
    pieces: int = 1
    stride: int = 0

    @property
    def span(self) -> int:
        """Return the number of bytes in the file from the first piece to the end of the last."""
        return (self.pieces - 1) * self.stride + self.length


def runs_of(shape: tuple[int, ...], index: Index, itemsize: int) -> tuple[tuple[int, ...], Iterator[SliceRun]]:
    """Return the shape of what `index` selects of a tensor, and its runs, whose `start` is relative to the tensor."""
    whole = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds, kept = list[tuple[int, int]](), list[int]()
    for one, size in zip(whole, shape, strict=True):
        start, stop, _ = slice(one, one + 1).indices(size) if isinstance(one, int) else one.indices(size)
        bounds.append((start, max(start, stop)))
        kept += [] if isinstance(one, int) else [max(0, stop - start)]
    # Dimensions from `split` on are selected whole, so each entry of dimension split - 1 is `inner` contiguous bytes. A
    # piece is the selected range of dimension split - 1. The entries of dimension split - 2 are the pieces of a run,
    # `stride` apart. Each entry of the earlier dimensions is a run of its own.
    split = len(shape)
    while split and bounds[split - 1] == (0, shape[split - 1]):
        split -= 1
    inner = prod(shape[split:]) * itemsize
    head, last = bounds[: max(0, split - 1)], bounds[split - 1] if split else (0, 1)
    length = (last[1] - last[0]) * inner
    strides = [prod(shape[at + 1 :]) * itemsize for at in range(len(shape))]

    (first, stop), stride = (head[-1], strides[len(head) - 1]) if head else ((0, 1), 0)

    def runs() -> Iterator[SliceRun]:
        at, count = 0, stop - first
        for place in product(*(range(a, b) for a, b in head[:-1])):
            start = sum(p * s for p, s in zip(place, strides, strict=False)) + first * stride + last[0] * inner
            yield SliceRun(start, at, length, count, stride)
            at += count * length

    return tuple(kept), runs()


class PinnedBuffers:
    """A few pinned buffers through which bytes go to a device; a buffer is reused when the device has read it."""

    def __init__(
        self,
        device: torch.device,
        make: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        event: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._device = device
        self._free: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
        for _ in range(THREADS):
            self._free.put((make(PART), event()))

    def send(self, fill: Callable[[memoryview], None], to: Tensor) -> None:
        """Let `fill` write bytes into a free buffer, and copy them to `to` on the device; at most `PART` bytes."""
        buffer, read = self._free.get()
        try:
            read.synchronize()
            fill(bytes_of(buffer)[: to.numel()])
            to.copy_(buffer[: to.numel()], non_blocking=True)
            read.record(*((torch.cuda.current_stream(to.device),) if to.is_cuda else ()))
        finally:
            self._free.put((buffer, read))


class SliceReader:
    """Reads slices of tensors; `nbytes` counts the bytes requested from files."""

    def __init__(self, pinned: Callable[[torch.device], PinnedBuffers] = PinnedBuffers) -> None:
        self.nbytes = 0
        self._counting = Lock()
        self._files: dict[Path, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pinned, self._buffers = pinned, dict[torch.device, PinnedBuffers]()

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
        kept, runs = runs_of(shape, index, dtype.itemsize)
        device = CPU if device is None else device
        count = prod(kept) * dtype.itemsize
        raw = torch.empty(count, dtype=torch.uint8, device=device)
        if device.type != "cpu" and device not in self._buffers:
            self._buffers[device] = self._pinned(device)
        if count:
            source = self._open(path)
            parts = _parts([run._replace(start=run.start + start) for run in runs])
            if count <= PART:
                for part in parts:
                    self._fill(path, source, part, raw, device)
            else:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(THREADS, "aerie-load")
                for done in [self._pool.submit(self._fill, path, source, part, raw, device) for part in parts]:
                    done.result()
        return raw.view(dtype).view(kept)

    def close(self) -> None:
        """Close the files, stop the threads and free the buffers."""
        if self._pool is not None:
            self._pool.shutdown()
        for source in self._files.values():
            os.close(source)
        self._pool = None
        self._files.clear()
        self._buffers.clear()

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def _fill(self, path: Path, source: int, part: list[SliceRun], raw: Tensor, device: torch.device) -> None:
        """Read the runs of a part, which are contiguous in the slice, to their place in `raw`."""
        begin, end = part[0].at, part[-1].at + part[-1].pieces * part[-1].length

        def fill(view: memoryview) -> None:
            for run in part:
                to = view[run.at - begin :][: run.pieces * run.length]
                if run.pieces == 1:
                    self._read(path, source, run.start, to)
                    continue
                # Short pieces: read the whole span, then copy the pieces out of it.
                around = torch.empty(run.span, dtype=torch.uint8, device=CPU)
                self._read(path, source, run.start, bytes_of(around))
                cut = around.as_strided((run.pieces, run.length), (run.stride, 1))
                torch.frombuffer(to, dtype=torch.uint8).view(run.pieces, run.length).copy_(cut)

        if (through := self._buffers.get(device)) is not None:
            through.send(fill, raw[begin:end])
        else:
            fill(bytes_of(raw)[begin:end])

    def _read(self, path: Path, source: int, start: int, view: memoryview) -> None:
        with self._counting:
            self.nbytes += len(view)
        done = 0
        while done < len(view):
            try:
                got = os.preadv(source, [view[done:]], start + done)
            except OSError as error:  # such as a failing network file system
                raise OSError(error.errno, error.strerror, str(path)) from None
            if not got:
                raise ConfigError(f"{str(path)!r} ends at byte {start + done}, within a tensor; copy the file again")
            done += got


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a uint8 tensor on the CPU."""
    given: Any = tensor.numpy()
    return memoryview(given)


def _parts(runs: list[SliceRun]) -> Iterator[list[SliceRun]]:
    """Cut and group runs into parts of at most `PART` bytes of the slice. A run of several short pieces is not grouped
    with others; it is cut into parts whose span in the file is at most `PART` bytes.
    """
    part: list[SliceRun] = []
    for run in runs:
        if run.pieces > 1 and run.length < SHORT and run.length <= PART:
            if part:
                yield part
            # (each - 1) * stride + length <= PART
            part, each = [], (PART - run.length) // run.stride + 1
            for i in range(0, run.pieces, each):
                start, at = run.start + i * run.stride, run.at + i * run.length
                yield [run._replace(start=start, at=at, pieces=min(each, run.pieces - i))]
            continue
        for i, cut in product(range(run.pieces), range(0, run.length, PART)):
            at, length = run.at + i * run.length + cut, min(PART, run.length - cut)
            if part and at + length - part[0].at > PART:
                yield part
                part = []
            part.append(SliceRun(run.start + i * run.stride + cut, at, length))
    if part:
        yield part
