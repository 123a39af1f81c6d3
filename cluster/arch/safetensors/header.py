"""Reads the header of a safetensors file: bounded in size, and checked before anything is allocated.

Format: 8 bytes little-endian length n, n bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the data without
gaps (huggingface/safetensors, README "Format").
"""

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from cluster.config import ConfigError

LONGEST = 100_000_000  # maximum bytes of JSON, by the format
SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per element of each supported dtype."""
INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs"  # the beginning of a git-lfs pointer file, which git leaves in place of the contents


class TensorLocation(NamedTuple):
    """The dtype and shape of a tensor, and its place: bytes `start` to `stop - 1` of its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return the tensors of one file by name.

    Raises:
        ConfigError: the file is not a readable safetensors file. The message names the file and any faulty tensor.
    """
    try:
        with path.open("rb") as file:
            size, begin = path.stat().st_size, file.read(8)
            length = int.from_bytes(begin, "little")
            if begin == LFS[:8] and begin + file.read(len(LFS) - 8) == LFS:
                raise _broken(path, "it is a pointer of git-lfs, not the weights; run `git lfs pull` in its folder")
            if size < 10 or length > min(size - 8, LONGEST):
                raise _broken(path, f"its header claims {length} bytes of a file of {size}")
            raw = file.read(length)
    except FileNotFoundError:
        remedy = _remedy_without(path)
        raise ConfigError(f"{path.name} is missing in {str(path.parent)!r}; {remedy}") from None
    except OSError as error:
        raise _broken(path, str(error)) from None
    return parse_header(raw, size, path)


def _remedy_without(path: Path) -> str:
    """Return what to do about a missing weight file. The advice depends on the other files of its folder."""
    folder = path.parent
    if (folder / INDEX).is_file():
        return "the index of the weights names it: the download was not finished, begin it again (hf download)"
    if any(folder.glob("*.safetensors")):
        return f"there are parts of a model without {INDEX}, which lists them: begin the download again"
    pickles = sorted(each.name for each in folder.glob("pytorch_model*.bin"))
    if pickles:
        return f"only safetensors are read; {pickles} are pickles: write them as safetensors first (docs/models.md)"
    return "only safetensors are read"


def parse_header(raw: bytes, size: int, path: Path) -> dict[str, TensorLocation]:
    """Return the tensors that the JSON `raw` lists for a file of `size` bytes; they must cover the file's data exactly.

    Raises:
        ConfigError: as `read_header`.
    """
    try:
        pairs = json.loads(raw.decode("utf-8"), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON: {error}") from None
    if not isinstance(pairs, dict):
        raise _broken(path, "its header is not a JSON object")
    metadata = pairs.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its __metadata__ must map names to strings")
    base = 8 + len(raw)
    found = {name: _entry(name, entry, base, path) for name, entry in pairs.items()}
    at, before = base, "the header"
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != at:
            raise _broken(path, f"tensor {name!r} begins at byte {stored.start}, but {before} ends at {at}")
        at, before = stored.stop, f"tensor {name!r}"
        if at > size:
            raise _broken(path, f"tensor {name!r} ends at byte {at} of a file of {size}; copy the file again")
    if at != size:
        raise _broken(path, f"{before} ends at byte {at} of a file of {size}")
    return found


def _entry(name: str, entry: Any, base: int, path: Path) -> TensorLocation:
    """Return one tensor's location; its byte count must match its dtype and shape."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"tensor {name!r} must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise _broken(path, f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(SIZES)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            raise _broken(path, f"tensor {name!r} has {what} {str(numbers)[:80]}, which must list whole numbers")
    if len(shape) > 8 or len(offsets) != 2:
        raise _broken(path, f"tensor {name!r} has {len(shape)} dimensions (at most 8) and {len(offsets)} offsets (2)")
    count = prod(shape) * SIZES[dtype]
    if offsets[1] - offsets[0] != count:
        raise _broken(
            path,
            f"tensor {name!r} lies at bytes {offsets[0]} to {offsets[1]}, but {dtype} of shape {shape} takes {count}",
        )
    return TensorLocation(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise if a name appears twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} appears twice")
        found[name] = value
    return found


def _broken(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{str(path)!r} is not a readable safetensors file: {what}")
