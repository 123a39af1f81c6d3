"""Slices of tensors from files: no other bytes are read, by several threads, straight to where they belong.

What is read goes into the tensor itself on a CPU. For a GPU it goes through a few pinned buffers, so the host never
holds more of it than these. A file is not mapped: its pages belong to the kernel's cache, not to this process.
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
PART = 8 << 20  # bytes that a thread reads at once, and of a pinned buffer
THREADS = 4  # that read: what a disk, and copying from the kernel's cache, can use
SHORT = 4096  # bytes: shorter pieces are cut out of what lies around them, which the disk reads anyway


class SliceRun(NamedTuple):
    """Pieces of a slice, `stride` bytes apart in the file: `length` bytes each from `start` on. In the slice they lie
    together, from byte `at` on.
    """

    start: int
    at: int
    length: int
    pieces: int = 1
    stride: int = 0

    @property
    def span(self) -> int:
        """The bytes of the file from the first to the last."""
        return (self.pieces - 1) * self.stride + self.length


def runs_of(shape: tuple[int, ...], index: Index, itemsize: int) -> tuple[tuple[int, ...], Iterator[SliceRun]]:
    """The shape of what `index` selects of a tensor, and where its bytes lie, from the tensor's first byte on."""
    whole = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds, kept = list[tuple[int, int]](), list[int]()
    for one, size in zip(whole, shape, strict=True):
        start, stop, _ = slice(one, one + 1).indices(size) if isinstance(one, int) else one.indices(size)
        bounds.append((start, max(start, stop)))
        kept += [] if isinstance(one, int) else [max(0, stop - start)]
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
    """A few buffers through which bytes go to a device; each is used again when the device has read it."""

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
        """Have `fill` write bytes, and copy them to `to` on the device, at most `PART`."""
        buffer, read = self._free.get()
        try:
            read.synchronize()
            fill(bytes_of(buffer)[: to.numel()])
            to.copy_(buffer[: to.numel()], non_blocking=True)
            read.record(*((torch.cuda.current_stream(to.device),) if to.is_cuda else ()))
        finally:
            self._free.put((buffer, read))


class SliceReader:
    """Reads slices; `nbytes` counts the bytes that were asked of files."""

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
        """What `index` selects of the tensor that begins at byte `start` of a file, on the device, or the CPU.

        Raises:
            ConfigError: the file ends before it.
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
        """Close the files."""
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
        """Read the runs of a part, which lie together in the slice, to their place in `raw`."""
        begin, end = part[0].at, part[-1].at + part[-1].pieces * part[-1].length

        def fill(view: memoryview) -> None:
            for run in part:
                to = view[run.at - begin :][: run.pieces * run.length]
                if run.pieces == 1:
                    self._read(path, source, run.start, to)
                    continue
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
            except OSError as error:  # as where a network's file system fails
                raise OSError(error.errno, error.strerror, str(path)) from None
            if not got:
                raise ConfigError(f"{str(path)!r} ends at byte {start + done}, within a tensor; copy the file again")
            done += got


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor of bytes on the CPU."""
    given: Any = tensor.numpy()
    return memoryview(given)


def _parts(runs: list[SliceRun]) -> Iterator[list[SliceRun]]:
    """The runs, cut and gathered into parts: each is at most `PART` bytes of the slice, and a run of pieces that are
    short is one of its own, at most `PART` bytes of the file.
    """
    part: list[SliceRun] = []
    for run in runs:
        if run.pieces > 1 and run.length < SHORT and run.length <= PART:
            if part:
                yield part
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
