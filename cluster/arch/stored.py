"""What the headers of a folder of safetensors say, read without opening a tensor: names and shapes."""

import json
import re
from pathlib import Path
from typing import Any

from cluster.arch.keys import Shapes
from cluster.config import ConfigError

HEADER_LIMIT = 100_000_000  # bytes; what safetensors itself allows
INDEX = "model.safetensors.index.json"
RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


def normal_name(name: str) -> str:
    """A name without dialect: no `model.` prefix, `midlayer` as `layers.0`, legacy aux norms as `fc_norm.i`."""
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def weight_files(folder: str) -> list[Path]:
    """`model.safetensors`, or the files that the weight index lists.

    Raises:
        ConfigError: the folder is missing, or its index is none.
    """
    root, index = Path(folder), Path(folder) / INDEX
    if not root.is_dir():
        raise ConfigError(f"model folder {folder!r} does not exist; give a local folder of safetensors")
    if not index.is_file():
        return [root / "model.safetensors"]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
        raise ConfigError(f"{index.name} in {folder!r} is no weight index; write it again") from None
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{index.name} in {folder!r} names {name!r} outside the folder")
    return [root / name for name in names]


def stored_shapes(folder: str) -> Shapes:
    """The shape of every tensor of a folder, under normalised names.

    Raises:
        ConfigError: a file is missing or its header cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                shapes[normal_name(name)] = tuple(int(size) for size in entry["shape"])
    return shapes


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= min(HEADER_LIMIT, path.stat().st_size - 8):
                raise ConfigError(f"{str(path)!r} is not a readable safetensors file: its header is cut off")
            header = json.loads(file.read(size))
            if not isinstance(header, dict) or not all(
                name == "__metadata__" or isinstance(entry.get("shape"), list) for name, entry in header.items()
            ):
                raise ValueError
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing in {str(path.parent)!r}; only safetensors are read") from None
    except (OSError, ValueError, AttributeError):
        raise ConfigError(f"{str(path)!r} is not a readable safetensors file: its header is no header") from None
    return header
