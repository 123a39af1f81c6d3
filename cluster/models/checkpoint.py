"""Strict reading of safetensors folders: a tensor that the model neither uses nor may ignore is an error."""

import logging
import re
from collections.abc import Callable

import torch
from torch import Tensor

from cluster.arch.quantisation import read_quantisation, with_unpacked_shapes
from cluster.arch.quantisation_rules import Scheme
from cluster.arch.safetensors.header import TensorLocation
from cluster.arch.safetensors.stored import missing_tensor, stored_tensors, unindexed_tensors
from cluster.arch.safetensors.tensors import ATTENTION_SCALES, IGNORED_TENSORS, packed_matrix_biases
from cluster.config import ConfigError
from cluster.kernels.quantised import Quantised
from cluster.models.formats import codes_name_of, read_mxfp4, reader_of
from cluster.models.slices import SliceReader
from cluster.models.stored import Index, Span, StoredMatrix
from cluster.models.tally import QuantisationTally

log = logging.getLogger(__name__)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CheckpointMatrix = Tensor | Quantised


def identity_name(name: str) -> str:
    """Return `name`: for checkpoints whose names need no translation."""
    return name


class Checkpoint:
    """The tensors of one folder, requested by the names that the model uses. At first only headers are read."""

    def __init__(
        self,
        folder: str,
        stored_name: Callable[[str], str] = identity_name,
        ignored: tuple[str, ...] = (),
        headers_only: bool = False,
    ) -> None:
        """Read the headers of the folder's file, or of the files that its index lists.

        `stored_name` returns the checkpoint's (normalised) name for a name that the model uses. `ignored` are patterns
        of tensors that may stay unused. If `headers_only`, tensors are checked as usual, but have no data and are on
        the meta device.

        Raises:
            ConfigError: a file is missing, is not valid safetensors, or two files hold the same tensor.
        """
        self.folder, self._stored_name, self._headers_only = folder, stored_name, headers_only
        self._ignored = [re.compile(pattern) for pattern in (IGNORED_TENSORS, ATTENTION_SCALES, *ignored)]
        self.reader = SliceReader()
        self._used: set[str] = set()
        self.tally = QuantisationTally()
        self._files = stored_tensors(folder)
        self.quantisation = read_quantisation(folder)
        shapes = {name: stored.shape for name, (_, _, stored) in self._files.items()}
        self.shapes = with_unpacked_shapes(shapes, self.quantisation)

    def contains(self, name: str) -> bool:
        """Whether the checkpoint has a tensor `name`."""
        return self._stored_name(name) in self._files

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        rows: Span | None = None,
        columns: Span | None = None,
        expert: int | None = None,
    ) -> Tensor:
        """Return what the method `matrix` returns, on the CPU. A quantised matrix is dequantised to float32."""
        matrix = self.matrix(name, shape, rows, columns, expert)
        if isinstance(matrix, Tensor):
            return matrix
        self.tally.dequantised[matrix.description] += 1
        return matrix.dequantised()

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        rows: Span | None = None,
        columns: Span | None = None,
        expert: int | None = None,
        device: torch.device | None = None,
    ) -> CheckpointMatrix:
        """Return the tensor `name` on `device` (None: the CPU), checked against `shape` and counted as used. A matrix
        that is quantised on disk stays quantised.

        `rows` and `columns` limit the last two dimensions to a span (None: all). A vector has only rows. `expert`
        selects one entry of a stack of experts; it is None if the tensor is not a stack, or if all entries are wanted.

        Raises:
            ConfigError: the tensor is missing or of another shape; the message names tensor and file.
        """
        stored = self._stored_name(name)
        read_quantised = reader_of(self, stored)
        if read_quantised is not None:
            shape = self.locate(stored).shape if shape is None else shape
            if len(shape) != (2 if expert is None else 3) or (expert is not None and read_quantised is not read_mxfp4):
                raise self.error(codes_name_of(self, stored), f"is quantised; of {list(shape)} that is not served")
            return read_quantised(self, StoredMatrix(stored, shape, rows, columns, expert, device))
        self.locate(stored, shape)
        return self.read(stored, (*(() if expert is None else (expert,)), *_slices(rows, columns)), device)

    def has_stored(self, stored: str) -> bool:
        """Whether the tensor `stored` exists."""
        return stored in self._files

    def locate(self, stored: str, shape: tuple[int, ...] | None = None) -> TensorLocation:
        """Return where the tensor `stored` lies, and count it as used.

        Raises:
            ConfigError: the tensor is missing or of another shape.
        """
        if stored not in self._files:
            raise missing_tensor(self.folder, stored)
        entry = self._files[stored][2]
        if shape is not None and entry.shape != shape:
            raise self.error(stored, f"is {list(entry.shape)} but the config requires {list(shape)}")
        self._used.add(stored)
        return entry

    def mark_used(self, stored: str) -> None:
        """Count the tensor `stored` as used, if it exists."""
        self._used.add(stored)

    def scheme(self, stored: str) -> Scheme:
        """Return the scheme that the config gives for the quantised matrix `stored`."""
        # Configs name modules as the checkpoint does on disk (`raw`), or by the normalised name.
        module = stored.removesuffix(".weight")
        raw = self._files[codes_name_of(self, stored)][1].rpartition(".")[0]
        return self.quantisation.scheme_of(raw, f"model.{module}", module)

    def error(self, stored: str, problem: str) -> ConfigError:
        """Return an error about the tensor `stored`; the message names it, its file and the `problem`."""
        path, raw, _ = self._files[stored]
        return ConfigError(f"tensor {raw!r} in {str(path)!r} {problem}")

    def read(self, stored: str, index: Index = (), device: torch.device | None = None) -> Tensor:
        """Return a copy of what `index` selects of the tensor `stored`, on `device` (None: the CPU)."""
        entry, dtype = self.locate(stored), DTYPES[self._files[stored][2].dtype]
        if self._headers_only:
            return torch.empty(entry.shape, dtype=dtype, device="meta")[index].clone()
        return self.reader.read(self._files[stored][0], entry.start, entry.shape, dtype, index, device)

    def check_only(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a matrix that another rank loads, and its scales, as the method `matrix` does, and count these tensors
        as used. Read no data.

        Raises:
            ConfigError: as `matrix`.
        """
        headers_only, self._headers_only = self._headers_only, True
        try:
            self.matrix(name, shape)
        finally:
            self._headers_only = headers_only

    def mark_name_used(self, name: str) -> None:
        """Count the tensor `name` as used, if it exists. Do not read it."""
        self._used.add(self._stored_name(name))

    def finish(self) -> list[str]:
        """Close the files; return notes for the user, such as the tally of quantised weights.

        Raises:
            ConfigError: some tensors were not used and may not be ignored; the message names them and a file.
        """
        unused = self._files.keys() - self._used
        unknown = {name for name in unused if not any(pattern.search(name) for pattern in self._ignored)}
        # Writers of AWQ and GPTQ store biases of zeros for layers without a bias.
        zero_biases = {
            name
            for name in packed_matrix_biases(unknown, self._files)
            if self._headers_only or not self.read(name).any()
        }
        if unknown := unknown - zero_biases:
            files = {raw: path for path, raw, _ in map(self._files.__getitem__, unknown)}
            names = sorted(files)[:8]
            raise ConfigError(f"tensors of {str(files[names[0]])!r} that the model does not know: {names}")
        self.reader.close()
        notes = self.tally.summary_lines(self.quantisation.quantised_activations)
        if zero_biases and self._headers_only:
            notes.append(
                f"{len(zero_biases)} biases that the model does not have: refused on load unless they hold only zeros"
            )
        elif zero_biases:
            notes.append(f"{len(zero_biases)} biases that hold only zeros were left out: the model has none there")
        num_attention_scales = sum(re.search(ATTENTION_SCALES, name) is not None for name in unused)
        if num_attention_scales:
            notes.append(
                f"{num_attention_scales} scales for attention in FP8 are not used: cells of the KV cache have their own"
            )
        if self._headers_only:
            return notes
        num_unserved = len(unused) - len(zero_biases) - num_attention_scales
        if unindexed := unindexed_tensors(self.folder):
            log.info(
                "%s: %d tensors were not read, as the index of the weights names another file for them or none: %s",
                self.folder,
                len(unindexed),
                ", ".join(f"{raw} in {path.name}" for path, raw in unindexed[:4]),
            )
        if num_unserved:
            log.info("%s: %d tensors belong to parts that are not served and were not read", self.folder, num_unserved)
        for line in notes:
            log.info("%s: %s", self.folder, line)
        return notes


def _slices(rows: Span | None, columns: Span | None) -> tuple[slice, ...]:
    row_slice = slice(None) if rows is None else slice(*rows)
    return (row_slice,) if columns is None else (row_slice, slice(*columns))


def to_device(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `tensor` contiguous, in `dtype`, on `device`."""
    return tensor.to(device=device, dtype=dtype).contiguous()
