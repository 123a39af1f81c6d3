"""Names and shapes of the tensors in a folder of safetensors files, read from headers only."""

import json
import re
from pathlib import Path

from cluster.arch.keys import Shapes, check_folder
from cluster.arch.quantisation import read_quantisation, with_whole
from cluster.arch.safetensors.header import TensorLocation, read_header
from cluster.config import ConfigError

FILES = ("model.safetensors", "consolidated.safetensors")
DECODER = ("layers", "embed_tokens", "norm")  # the parts of a model whose names begin with `model.` in most checkpoints
RENAMES = (
    (re.compile(r"^(model\.)?(language_model\.)?(model\.)?"), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


def normal_name(name: str) -> str:
    """Return the normalised name of a tensor: without `model.`, with `layers.0` for `midlayer`, and with `fc_norm.i`
    for legacy aux norms.
    """
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def weight_files(folder: str) -> tuple[list[Path], dict[str, Path]]:
    """Return a folder's weight files, and the file of each tensor in the index (empty without an index).

    The files are `model.safetensors` or `consolidated.safetensors`, or the files that the index of one of these names
    lists. If there is none of these, the folder's only safetensors file is used; AutoGPTQ names it after its settings.

    Raises:
        ConfigError: the folder is missing, its index is malformed, or it holds two sets of weights.
    """
    root = Path(folder)
    check_folder(folder)
    for name in FILES:
        index = root / f"{name}.index.json"
        if index.is_file():
            files, places = _indexed(index)
            if root / name not in files and (root / name).is_file():
                raise ConfigError(
                    f"{folder!r} has {name} and, beside it, {index.name}, which names other files; remove those that "
                    "are not meant"
                )
            return files, places
        if (root / name).is_file():
            return [root / name], {}
    files = sorted(root.glob("*.safetensors"))
    return [files[0] if len(files) == 1 else root / FILES[0]], {}


def _indexed(index: Path) -> tuple[list[Path], dict[str, Path]]:
    folder = str(index.parent)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(tensor): str(file) for tensor, file in weight_map.items()}
        if not named:
            raise ValueError("no tensor")
    except OSError as error:
        raise ConfigError(f"{index.name} in {folder!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index.name} in {folder!r} is not a weight index; write it again") from None
    names = sorted(set(named.values()))
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{index.name} in {folder!r} names {name!r}, which is outside the folder")
    return [index.parent / name for name in names], {tensor: index.parent / file for tensor, file in named.items()}


def stored_tensors(folder: str) -> dict[str, tuple[Path, str, TensorLocation]]:
    """Return every tensor of a folder by normalised name: its file, its name in that file, and its location.

    If there is an index, it decides: a tensor is read only from the file that the index names for it.

    Raises:
        ConfigError: a file is missing, its header is malformed, or two tensors have the same name.
    """
    found: dict[str, tuple[Path, str, TensorLocation]] = {}
    files, places = weight_files(folder)
    for path in files:
        for raw, stored in read_header(path).items():
            if places and places.get(raw) != path:
                continue
            name = normal_name(raw)
            if name in found:
                raise ConfigError(f"tensor {raw!r} appears twice in {folder!r}, again in {path.name}")
            found[name] = (path, raw, stored)
    return found


def left_out(folder: str) -> list[tuple[Path, str]]:
    """Return the tensors in a folder's weight files that are not used, because of the index: (file, name) pairs.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    files, places = weight_files(folder)
    return [(path, raw) for path in files for raw in read_header(path) if places and places.get(raw) != path]


def missing_tensor(folder: str, name: str) -> ConfigError:
    """Return the error for a missing tensor, given its normalised name; the message uses the checkpoint's naming."""
    files, places = weight_files(folder)
    raw = name_on_disk(folder, name)
    where = places.get(raw, files[0] if len(files) == 1 else Path(folder))
    beside = next((path.name for path, other in left_out(folder) if normal_name(other) == name), None)
    says = "names another file for it" if raw in places else "leaves it out"
    why = "" if beside is None else f"; {beside} holds it, but the index of the weights {says}"
    return ConfigError(f"tensor {raw!r} is missing in {str(where)!r}{why}")


def name_on_disk(folder: str, name: str) -> str:
    """Return the checkpoint's name of a tensor, given its normalised name.

    If the checkpoint lacks the tensor, its name gets the prefix that other tensors of the same part of the model have,
    or the decoder's prefix.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    held = {normal: raw for normal, (_, raw, _) in stored_tensors(folder).items()}
    listed = {normal_name(raw): raw for raw in weight_files(folder)[1]}
    if (known := held.get(name, listed.get(name))) is not None:
        return known
    if name.startswith("layers.0.") and any(raw.startswith("midlayer.") for raw in held.values()):
        return name.replace("layers.0.", "midlayer.", 1)
    begun = {other.partition(".")[0]: raw.removesuffix(other) for other, raw in held.items() if raw.endswith(other)}
    part = name.partition(".")[0]
    decoder = next((begun[each] for each in DECODER if each in begun), "")
    outside = "language_model." if decoder.startswith("language_model.") else ""
    return begun.get(part, decoder if part in DECODER else outside) + name


def stored_shapes(folder: str) -> Shapes:
    """Return the shape of every tensor of a folder by normalised name. For a matrix packed in int32, the unpacked shape
    is added.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    shapes = {name: stored.shape for name, (_, _, stored) in stored_tensors(folder).items()}
    return with_whole(shapes, read_quantisation(folder))
