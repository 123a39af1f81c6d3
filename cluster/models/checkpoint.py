"""Strict reading of safetensors folders: a tensor that nothing uses is an error; quantised ones are dequantised."""

import logging
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cluster.arch.safetensors.header import Stored
from cluster.arch.safetensors.stored import stored_tensors, weight_files
from cluster.arch.safetensors.tensors import IGNORED
from cluster.config import ConfigError
from cluster.models.quant import BLOCK, FLOAT8, GROUP, block_scaled, mxfp4

log = logging.getLogger(__name__)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Span = tuple[int, int]
SCALES = ("_scale_inv", "_scale")
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".qscale_act")


def as_it_is(name: str) -> str:
    """The same name."""
    return name


class Checkpoint:
    """The tensors of one folder under normalised names; only headers are read until a tensor is taken."""

    def __init__(
        self,
        folder: str,
        stored_name: Callable[[str], str] = as_it_is,
        ignored: tuple[str, ...] = (),
        dry: bool = False,
    ) -> None:
        """Open the headers of the one file, or of those that its index lists.

        `stored_name` turns a requested name into the checkpoint's; `ignored` are patterns of tensors that may stay
        unused. When `dry`, tensors are checked as usual, but come without data, on the meta device.

        Raises:
            ConfigError: a file is missing, is not valid safetensors, or two files hold the same tensor.
        """
        self.folder, self._stored_name, self._dry = folder, stored_name, dry
        self._ignored = [re.compile(pattern) for pattern in (IGNORED, *ignored)]
        self._maps: dict[Path, mmap.mmap] = {}
        self._taken: set[str] = set()
        self._dequantised = 0
        self._paths, self._promised = weight_files(folder)
        self._files = stored_tensors(folder)
        self.shapes: dict[str, tuple[int, ...]] = {name: held.shape for name, (_, _, held) in self._files.items()}

    def holds(self, name: str) -> bool:
        """Whether there is a tensor `name`."""
        return self._stored_name(name) in self._files

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        rows: Span | None = None,
        columns: Span | None = None,
        expert: int | None = None,
    ) -> Tensor:
        """The tensor `name` on the CPU, checked against `shape` and counted as used; FP8 and MXFP4 come as float32.

        `rows` and `columns` limit what is read of the last two dimensions (a vector has only rows), `expert` selects
        one entry of a stack of experts.

        Raises:
            ConfigError: missing, or of another shape; the message names tensor and file.
        """
        stored = self._stored_name(name)
        if stored not in self._files and f"{stored}_blocks" in self._files:
            return self._mxfp4(stored, shape, rows, columns, expert)
        path, raw, entry = self._entry(stored, shape)
        index = () if expert is None else (expert,)
        cut = self._read(path, entry, (*index, *_slices(rows, columns)))
        return self._scaled(stored, raw, entry, cut, rows, columns) if DTYPES[entry.dtype] in FLOAT8 else cut

    def _entry(self, stored: str, shape: tuple[int, ...] | None) -> tuple[Path, str, Stored]:
        if stored not in self._files:
            single = self._paths[0] if len(self._paths) == 1 else Path(self.folder)
            raise ConfigError(f"tensor {stored!r} is missing in {str(self._promised.get(stored, single))!r}")
        path, raw, entry = self._files[stored]
        if shape is not None and entry.shape != shape:
            raise ConfigError(
                f"tensor {raw!r} in {str(path)!r} is {list(entry.shape)} but the config requires {list(shape)}"
            )
        self._taken.add(stored)
        return path, raw, entry

    def _read(self, path: Path, entry: Stored, index: tuple[slice | int, ...]) -> Tensor:
        """A copy of what `index` selects; the mapped pages are released, so that files do not pile up in memory."""
        count, dtype = entry.stop - entry.start, DTYPES[entry.dtype]
        if self._dry or not count:
            return torch.empty(entry.shape, dtype=dtype, device="meta" if self._dry else None)[index].clone()
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped = self._maps[path]
        data = torch.frombuffer(mapped, dtype=torch.uint8, offset=entry.start, count=count)
        if entry.start % dtype.itemsize:
            data = data.clone()
        cut = data.view(dtype).view(entry.shape)[index].clone()
        if count > mmap.PAGESIZE:
            first = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, entry.stop - first)
        return cut

    def _scaled(
        self, stored: str, raw: str, entry: Stored, cut: Tensor, rows: Span | None, columns: Span | None
    ) -> Tensor:
        """FP8 times its scale: one per tensor, one per row, or one per block of 128 x 128."""
        path, stem = self._files[stored][0], stored.removesuffix(".weight")
        names = [f"{stored}{end}" for end in SCALES] + [f"{stem}.qscale_weight"]
        found = [name for name in names if name in self._files]
        if len(found) != 1:
            raise ConfigError(f"tensor {raw!r} in {str(path)!r} is FP8 and needs one scale, {names[0]!r}; has {found}")
        for end in ACTIVATION_SCALES:
            self.drop(f"{stem}{end}")
        place, scale_name, scale = self._files[found[0]]
        self._taken.add(found[0])
        scales = self._read(place, scale, ()).float()
        self._dequantised += 1
        row, column = (rows or (0, 0))[0], (columns or (0, 0))[0]
        if scales.numel() == 1:
            return cut.float() * scales.view(())
        if len(entry.shape) == 2 and scale.shape == (entry.shape[0], 1):
            return cut.float() * (scales if rows is None else scales[slice(*rows)])
        blocks = tuple(-(-size // BLOCK) for size in entry.shape)
        if len(entry.shape) != 2 or scale.shape != blocks:
            raise ConfigError(
                f"tensor {scale_name!r} in {str(place)!r} is {list(scale.shape)} but {raw!r} of {list(entry.shape)} "
                f"needs {list(blocks)} scales, one per block of {BLOCK} x {BLOCK}"
            )
        return block_scaled(cut, scales, row, column)

    def _mxfp4(
        self, stored: str, shape: tuple[int, ...] | None, rows: Span | None, columns: Span | None, expert: int | None
    ) -> Tensor:
        """MXFP4 of `shape` `[.., out, in]`, stored as `_blocks` `[.., in / 32, 16]` and `_scales` `[.., in / 32]`."""
        if shape is not None and shape[-1] % GROUP:
            raise ConfigError(f"tensor '{stored}_blocks' in {self.folder!r}: {shape[-1]} inputs, not a multiple of 32")
        packed = None if shape is None else (*shape[:-1], shape[-1] // GROUP)
        index: tuple[slice | int, ...] = () if expert is None else (expert,)
        start, stop = columns or (0, 0)
        groups = None if columns is None else (start // GROUP, -(-stop // GROUP))
        index += _slices(rows, groups)
        parts = []
        for end, tail in (("_blocks", (GROUP // 2,)), ("_scales", ())):
            path, raw, entry = self._entry(stored + end, None if packed is None else (*packed, *tail))
            if entry.dtype != "U8":
                raise ConfigError(f"tensor {raw!r} in {str(path)!r} is {entry.dtype}, but MXFP4 must be stored as U8")
            parts.append(self._read(path, entry, index))
        self._dequantised += 1
        values = mxfp4(*parts)
        if groups is None:
            return values
        first = start - groups[0] * GROUP
        return values[..., first : first + stop - start]

    def drop(self, name: str) -> None:
        """Count `name`, if present, as accounted for without reading it."""
        self._taken.add(self._stored_name(name))

    def finish(self) -> None:
        """Refuse tensors that nothing used, and close the files.

        Raises:
            ConfigError: such tensors exist; the message names them and their file.
        """
        left = {
            raw: path
            for name, (path, raw, _) in self._files.items()
            if name not in self._taken and not any(pattern.search(name) for pattern in self._ignored)
        }
        if left:
            names = sorted(left)[:8]
            raise ConfigError(f"tensors of {str(left[names[0]])!r} that the model does not know: {names}")
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        if self._dry:
            return
        others = len(self._files) - len(self._taken & self._files.keys())
        if others:
            log.info("%s: %d tensors belong to parts that are not served and were not read", self.folder, others)
        if self._dequantised:
            log.info("%s: %d quantised tensors were dequantised on load", self.folder, self._dequantised)


def _slices(rows: Span | None, columns: Span | None) -> tuple[slice, ...]:
    first = slice(None) if rows is None else slice(*rows)
    return (first,) if columns is None else (first, slice(*columns))


def placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`tensor` contiguous in the compute dtype on the device."""
    return tensor.to(device=device, dtype=dtype).contiguous()
