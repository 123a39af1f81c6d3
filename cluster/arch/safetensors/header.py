"""Reads the header of a safetensors file. The header's size is bounded, and its contents are checked.

Format: 8 bytes with the length n in little-endian order, n bytes of JSON `{name: {dtype, shape, data_offsets}}`, then
the data without gaps (huggingface/safetensors, README "Format").
"""

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from cluster.config import ConfigError

MAX_HEADER_BYTES = 100_000_000  # maximum bytes of JSON, by the format
DTYPE_BYTES = {
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
INDEX_FILE = "model.safetensors.index.json"
# The beginning of a git-lfs pointer file, which git leaves in place of the contents
LFS_POINTER_START = b"version https://git-lfs"


class TensorLocation(NamedTuple):
    """The dtype and shape of a tensor, and its place: bytes `start` to `stop - 1` of its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return dtype, shape and place of each tensor in a safetensors file, keyed by the tensor's name.

    Raises:
        ConfigError: the file is not a readable safetensors file. The message names the file and any faulty tensor.
    """
    try:
        with path.open("rb") as file:
            size, begin = path.stat().st_size, file.read(8)
            length = int.from_bytes(begin, "little")
            if begin == LFS_POINTER_START[:8] and begin + file.read(len(LFS_POINTER_START) - 8) == LFS_POINTER_START:
                raise _unreadable(path, "it is a pointer of git-lfs, not the weights; run `git lfs pull` in its folder")
            if size < 10 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _unreadable(path, f"its header claims {length} bytes of a file of {size}")
            raw = file.read(length)
    except FileNotFoundError:
        remedy = _missing_file_remedy(path)
        raise ConfigError(f"{path.name} is missing in {str(path.parent)!r}; {remedy}") from None
    except OSError as error:
        raise _unreadable(path, str(error)) from None
    return parse_header(raw, size, path)


def _missing_file_remedy(path: Path) -> str:
    """Return what to do about a missing weight file. The advice depends on the other files of its folder."""
    folder = path.parent
    if (folder / INDEX_FILE).is_file():
        return "the index of the weights names it: the download was not finished, begin it again (hf download)"
    if any(folder.glob("*.safetensors")):
        return f"there are parts of a model without {INDEX_FILE}, which lists them: begin the download again"
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        return f"only safetensors are read; {pickles} are pickles: write them as safetensors first (docs/models.md)"
    return "only safetensors are read"


def parse_header(raw: bytes, size: int, path: Path) -> dict[str, TensorLocation]:
    """Return the tensors that the JSON `raw` lists for a file of `size` bytes; they must cover the file's data exactly.

    Raises:
        ConfigError: as `read_header`.
    """
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_fields)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _unreadable(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise _unreadable(path, "its __metadata__ must map names to strings")
    base = 8 + len(raw)
    tensors = {name: _parse_location(name, entry, base, path) for name, entry in header.items()}
    end, previous = base, "the header"
    for name, location in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if location.start != end:
            raise _unreadable(path, f"tensor {name!r} begins at byte {location.start}, but {previous} ends at {end}")
        end, previous = location.stop, f"tensor {name!r}"
        if end > size:
            raise _unreadable(path, f"tensor {name!r} ends at byte {end} of a file of {size}; copy the file again")
    if end != size:
        raise _unreadable(path, f"{previous} ends at byte {end} of a file of {size}")
    return tensors


def _parse_location(name: str, fields: Any, base: int, path: Path) -> TensorLocation:
    """Return one tensor's location; its byte count must match its dtype and shape."""
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise _unreadable(path, f"tensor {name!r} must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _unreadable(path, f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    for field, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or any(type(n) is not int or not 0 <= n < 2**62 for n in values):
            raise _unreadable(path, f"tensor {name!r} has {field} {str(values)[:80]}, which must list whole numbers")
    if len(shape) > 8 or len(offsets) != 2:
        raise _unreadable(
            path, f"tensor {name!r} has {len(shape)} dimensions (at most 8) and {len(offsets)} offsets (2)"
        )
    byte_count = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != byte_count:
        raise _unreadable(
            path,
            f"tensor {name!r} lies at bytes {offsets[0]} to {offsets[1]}, but {dtype} of shape {shape} takes "
            f"{byte_count}",
        )
    return TensorLocation(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise if a name appears twice."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name[:80]!r} appears twice")
        fields[name] = value
    return fields


def _unreadable(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{str(path)!r} is not a readable safetensors file: {problem}")
