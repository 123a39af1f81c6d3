"""FR-Spec's token map (arXiv 2502.14856): the ids that a draft ranks with the target's own head, read from a file.

The file is a JSON list of ids, or a safetensors file with one tensor of ids; a pickle is never read. The map `d2t` in a
draft's own checkpoint is something else; `vocabulary_map_doubts` checks it.
"""

import json
import os
import struct
from pathlib import Path

from cluster.arch.keys import Shapes
from cluster.arch.safetensors.header import read_header
from cluster.arch.safetensors.stored import stored_tensors
from cluster.config import ConfigError

SETTING = "speculative_token_map"
STRUCT_CODES = {"I64": "q", "I32": "i"}
MAX_FILE_BYTES = 64 << 20  # a larger file is refused; no vocabulary needs as much


def read_token_map(file: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids in `file`, in ascending order. In the file they may be in any order.

    Raises:
        ConfigError: the file does not exist, or does not hold distinct ids of the target's vocabulary.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{SETTING}: {file!r} is not a file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{SETTING}: {file!r} is larger than {MAX_FILE_BYTES} bytes, so it is not a list of token ids"
        )
    ids = _read_json_ids(path) if path.suffix == ".json" else _read_tensor_ids(path)
    invalid_id = next((i for i in ids if not 0 <= i < vocab_size), None)
    if invalid_id is not None:
        raise ConfigError(f"{SETTING}: {file!r} holds {invalid_id}, which is not an id of the target's {vocab_size}")
    if not ids or len(set(ids)) != len(ids):
        raise ConfigError(f"{SETTING}: {file!r} must hold each id once, and at least one; it holds {len(ids)}")
    return tuple(sorted(ids))


def _read_json_ids(path: Path) -> list[int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SETTING}: {str(path)!r} is not valid JSON: {error}") from None
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ConfigError(f"{SETTING}: {str(path)!r} must hold a list of token ids, [0, 1, 2]")
    return ids


def _read_tensor_ids(path: Path) -> list[int]:
    tensors = read_header(path)
    (location,) = tensors.values() if len(tensors) == 1 else (None,)
    if location is None or location.dtype not in STRUCT_CODES or len(location.shape) != 1:
        tensor_types = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in list(tensors.items())[:4]}
        raise ConfigError(f"{SETTING}: {str(path)!r} must hold one tensor [ids] of I64 or I32; it holds {tensor_types}")
    data = path.read_bytes()[location.start : location.stop]
    return list(struct.unpack(f"<{location.shape[0]}{STRUCT_CODES[location.dtype]}", data))


def vocabulary_map_doubts(folder: str, shapes: Shapes, map_size: int, vocab_size: int) -> list[str]:
    """Return doubts (sentences about what is odd) about the map `d2t` of `map_size` ids in a draft's folder.

    `d2t` holds offsets: target id = draft id + offset. So a `d2t` of only zeros means the target's first ids. If the
    checkpoint has no `t2d` (the inverse map) either, such a `d2t` was most likely never filled in, and gives a doubt.
    If `d2t` lies in a hole of a sparse file, its data was not fetched, and no doubt is returned.

    Raises:
        ConfigError: a file of the folder is missing or malformed.
    """
    if map_size == vocab_size or "t2d" in shapes:
        return []
    path, _, location = stored_tensors(folder)["d2t"]
    with path.open("rb") as file:
        if file.seek(location.start, os.SEEK_HOLE) < location.stop:
            return []  # a hole in a sparse file reads as zeros
        file.seek(location.start)
        if any(file.read(location.stop - location.start)):
            return []
    return [
        f"its vocabulary map d2t holds only zeros, and no t2d confirms it: it drafts only the target's first "
        f"{map_size} ids of {vocab_size}, as if the map had never been filled in"
    ]
