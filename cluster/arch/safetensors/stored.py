"""What the headers of a folder of safetensors say, read without opening a tensor: names and shapes."""

import json
import re
from pathlib import Path

from cluster.arch.keys import Shapes, check_folder
from cluster.arch.quantisation import read_quantisation, with_whole
from cluster.arch.safetensors.header import Stored, read_header
from cluster.config import ConfigError

FILES = ("model.safetensors", "consolidated.safetensors")
RENAMES = (
    (re.compile(r"^(model\.)?(language_model\.)?(model\.)?"), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


def normal_name(name: str) -> str:
    """A name without its producer's dialect: no `model.`, `midlayer` as `layers.0`, legacy aux norms as `fc_norm.i`."""
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def weight_files(folder: str) -> tuple[list[Path], dict[str, Path]]:
    """A folder's weight files, and for each normalised tensor name the file that its index, if it has one, gives.

    `model.safetensors` or `consolidated.safetensors`, or the files that the weight index of one of them lists; else the
    one file of safetensors that there is, as AutoGPTQ names it after its settings.

    Raises:
        ConfigError: the folder is missing, its index is malformed, or it holds two sets of weights.
    """
    root = Path(folder)
    check_folder(folder)
    for name in FILES:
        index = root / f"{name}.index.json"
        if index.is_file():
            files, promised = _indexed(index)
            if root / name not in files and (root / name).is_file():
                raise ConfigError(
                    f"{folder!r} has {name} and, beside it, {index.name}, which names other files; remove those that "
                    "are not meant"
                )
            return files, promised
        if (root / name).is_file():
            return [root / name], {}
    files = sorted(root.glob("*.safetensors"))
    return [files[0] if len(files) == 1 else root / FILES[0]], {}


def _indexed(index: Path) -> tuple[list[Path], dict[str, Path]]:
    folder = str(index.parent)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {str(tensor): str(file) for tensor, file in weight_map.items()}
        if not places:
            raise ValueError("no tensor")
    except OSError as error:
        raise ConfigError(f"{index.name} in {folder!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index.name} in {folder!r} is not a weight index; write it again") from None
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{index.name} in {folder!r} names {name!r}, which is outside the folder")
    promised = {normal_name(tensor): index.parent / file for tensor, file in places.items()}
    return [index.parent / name for name in names], promised


def stored_tensors(folder: str) -> dict[str, tuple[Path, str, Stored]]:
    """Every tensor of a folder under its normalised name: its file, the name it has there, and where it lies.

    Raises:
        ConfigError: a file is missing, its header is malformed, or two tensors have the same name.
    """
    found: dict[str, tuple[Path, str, Stored]] = {}
    for path in weight_files(folder)[0]:
        for raw, stored in read_header(path).items():
            name = normal_name(raw)
            if name in found:
                raise ConfigError(f"tensor {raw!r} appears twice in {folder!r}, again in {path.name}")
            found[name] = (path, raw, stored)
    return found


def stored_shapes(folder: str) -> Shapes:
    """The shape of every tensor of a folder, under normalised names, and of the matrices that some of them hold packed.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    shapes = {name: stored.shape for name, (_, _, stored) in stored_tensors(folder).items()}
    return with_whole(shapes, read_quantisation(folder).bits)
