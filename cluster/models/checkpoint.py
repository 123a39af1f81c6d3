"""Strict reading of safetensors folders: every tensor is taken exactly once, or named in an error."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.arch.stored import normal_name, weight_files
from cluster.config import ConfigError

Span = tuple[int, int]
IGNORED = re.compile(r"rotary_emb\.inv_freq$")


class Checkpoint:
    """The tensors of one folder under normalised names; reads lazily, one tensor at a time."""

    def __init__(self, folder: str) -> None:
        """Open the headers of `model.safetensors` or of the shards that `model.safetensors.index.json` lists.

        Raises:
            ConfigError: a file is missing, is not valid safetensors, or two files hold the same tensor.
        """
        self.folder = folder
        self._files: dict[str, tuple[Path, str]] = {}
        self._taken: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(folder):
            with _opened(path) as file:
                for raw in list(file.keys()):
                    name = normal_name(raw)
                    if name in self._files:
                        raise ConfigError(f"tensor {raw!r} appears twice in {folder!r}")
                    self._files[name] = (path, raw)
                    self.shapes[name] = tuple(file.get_slice(raw).get_shape())

    def take(
        self, name: str, shape: tuple[int, ...] | None = None, rows: Span | None = None, columns: Span | None = None
    ) -> Tensor:
        """The tensor `name` in its stored dtype on the CPU, checked against `shape` and counted as used.

        Of a shard only `rows` (of the first dimension) or `columns` (of the second) are read.

        Raises:
            ConfigError: missing, or of another shape; the message names tensor and file.
        """
        if name not in self._files:
            raise ConfigError(f"tensor {name!r} is missing in {self.folder!r}")
        path, raw = self._files[name]
        if shape is not None and self.shapes[name] != shape:
            raise ConfigError(
                f"tensor {raw!r} in {str(path)!r} is {list(self.shapes[name])} but the config makes it {list(shape)}"
            )
        self._taken.add(name)
        with _opened(path) as file:
            part = file.get_slice(raw)
            if columns is not None:
                return _tensor(part[:, slice(*columns)])
            return _tensor(part[slice(*rows)] if rows is not None else file.get_tensor(raw))

    def drop(self, name: str) -> None:
        """Count `name`, if present, as accounted for without reading it."""
        self._taken.add(name)

    def finish(self) -> None:
        """Refuse leftovers.

        Raises:
            ConfigError: tensors that nothing took, named.
        """
        left = [raw for name, (_, raw) in self._files.items() if name not in self._taken and not IGNORED.search(name)]
        if left:
            raise ConfigError(f"tensors of {self.folder!r} that the model does not know: {sorted(left)[:8]}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing in {str(path.parent)!r}; only safetensors are read") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{str(path)!r} is not a readable safetensors file: {error}") from None


def _tensor(read: Any) -> Tensor:
    assert isinstance(read, Tensor), "safetensors was opened for torch"
    return read


def placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`tensor` contiguous in the compute dtype on the device."""
    return tensor.to(device=device, dtype=dtype).contiguous()
