"""Names and shapes of the tensors in a folder of safetensors files, read from headers only."""

import json
import re
from pathlib import Path

from cluster.arch.keys import Shapes, check_folder
from cluster.arch.quantisation import read_quantisation, with_unpacked_shapes
from cluster.arch.safetensors.header import TensorLocation, read_header
from cluster.config import ConfigError

WEIGHT_FILES = ("model.safetensors", "consolidated.safetensors")
DECODER_PARTS = (
    "layers",
    "embed_tokens",
    "norm",
)  # the parts of a model whose names begin with `model.` in most checkpoints
RENAMES = (
    (re.compile(r"^(model\.)?(language_model\.)?(model\.)?"), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


def normalise_name(name: str) -> str:
    """Return the normalised name of a tensor: without the prefixes `model.` and `language_model.`, with `layers.0` for
    `midlayer`, and with `fc_norm.i` for EAGLE-3's older names `aux_norm_low`, `aux_norm_mid` and `aux_norm_high`.
    """
    for pattern, replacement in RENAMES:
        name = pattern.sub(replacement, name)
    return name


def weight_files(folder: str) -> tuple[list[Path], dict[str, Path]]:
    """Return a folder's weight files, and the file of each tensor in the index (empty without an index).

    The files are `model.safetensors` or `consolidated.safetensors`, or the files that the index of one of these names
    lists. If there is none of these, the folder's only safetensors file is used (AutoGPTQ names its file after its
    settings). If there are several or none, the path of `model.safetensors` is returned, which does not exist.

    Raises:
        ConfigError: the folder is missing, its index is malformed, or it holds two sets of weights.
    """
    root = Path(folder)
    check_folder(folder)
    for name in WEIGHT_FILES:
        index = root / f"{name}.index.json"
        if index.is_file():
            files, file_of_tensor = _read_index(index)
            if root / name not in files and (root / name).is_file():
                raise ConfigError(
                    f"{folder!r} has {name} and, beside it, {index.name}, which names other files; remove those that "
                    "are not meant"
                )
            return files, file_of_tensor
        if (root / name).is_file():
            return [root / name], {}
    files = sorted(root.glob("*.safetensors"))
    return [files[0] if len(files) == 1 else root / WEIGHT_FILES[0]], {}


def _read_index(index: Path) -> tuple[list[Path], dict[str, Path]]:
    folder = str(index.parent)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_names = {str(tensor): str(file) for tensor, file in weight_map.items()}
        if not file_names:
            raise ValueError("no tensor")
    except OSError as error:
        raise ConfigError(f"{index.name} in {folder!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index.name} in {folder!r} is not a weight index; write it again") from None
    names = sorted(set(file_names.values()))
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{index.name} in {folder!r} names {name!r}, which is outside the folder")
    return [index.parent / name for name in names], {tensor: index.parent / file for tensor, file in file_names.items()}


def stored_tensors(folder: str) -> dict[str, tuple[Path, str, TensorLocation]]:
    """Return every tensor of a folder by normalised name: its file, its name in that file, and its location.

    If there is an index, a tensor is taken only from the file that the index names for it.

    Raises:
        ConfigError: a file is missing, its header is malformed, or two tensors have the same name.
    """
    tensors: dict[str, tuple[Path, str, TensorLocation]] = {}
    files, file_of_tensor = weight_files(folder)
    for path in files:
        for raw_name, location in read_header(path).items():
            if file_of_tensor and file_of_tensor.get(raw_name) != path:
                continue
            name = normalise_name(raw_name)
            if name in tensors:
                raise ConfigError(f"tensor {raw_name!r} appears twice in {folder!r}, again in {path.name}")
            tensors[name] = (path, raw_name, location)
    return tensors


def unindexed_tensors(folder: str) -> list[tuple[Path, str]]:
    """Return (file, name) pairs of the tensors in a folder's weight files that are not used because the index names no
    file, or another file, for them.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    files, file_of_tensor = weight_files(folder)
    return [
        (path, raw_name)
        for path in files
        for raw_name in read_header(path)
        if file_of_tensor and file_of_tensor.get(raw_name) != path
    ]


def missing_tensor(folder: str, name: str) -> ConfigError:
    """Return the error for a missing tensor, given its normalised name; the message uses the checkpoint's naming."""
    files, file_of_tensor = weight_files(folder)
    raw_name = name_on_disk(folder, name)
    expected_path = file_of_tensor.get(raw_name, files[0] if len(files) == 1 else Path(folder))
    other_file = next(
        (path.name for path, other_name in unindexed_tensors(folder) if normalise_name(other_name) == name), None
    )
    index_problem = "names another file for it" if raw_name in file_of_tensor else "leaves it out"
    explanation = "" if other_file is None else f"; {other_file} holds it, but the index of the weights {index_problem}"
    return ConfigError(f"tensor {raw_name!r} is missing in {str(expected_path)!r}{explanation}")


def name_on_disk(folder: str, name: str) -> str:
    """Return the checkpoint's name of a tensor, given its normalised name.

    If the checkpoint lacks the tensor, the name gets the prefix that other tensors of the same part of the model have.
    If there are none, it gets the prefix of the decoder's tensors, or `language_model.` if it is outside the decoder
    and the decoder's names begin with `language_model.`.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    raw_names = {normal: raw for normal, (_, raw, _) in stored_tensors(folder).items()}
    indexed_names = {normalise_name(raw): raw for raw in weight_files(folder)[1]}
    if (raw_name := raw_names.get(name, indexed_names.get(name))) is not None:
        return raw_name
    if name.startswith("layers.0.") and any(raw.startswith("midlayer.") for raw in raw_names.values()):
        return name.replace("layers.0.", "midlayer.", 1)
    prefixes = {
        other.partition(".")[0]: raw.removesuffix(other) for other, raw in raw_names.items() if raw.endswith(other)
    }
    first_part = name.partition(".")[0]
    decoder_prefix = next((prefixes[decoder_part] for decoder_part in DECODER_PARTS if decoder_part in prefixes), "")
    outer_prefix = "language_model." if decoder_prefix.startswith("language_model.") else ""
    return prefixes.get(first_part, decoder_prefix if first_part in DECODER_PARTS else outer_prefix) + name


def stored_shapes(folder: str) -> Shapes:
    """Return the shape of every tensor of a folder by normalised name. For a matrix packed in int32, the unpacked shape
    is added.

    Raises:
        ConfigError: as `stored_tensors`.
    """
    shapes = {name: location.shape for name, (_, _, location) in stored_tensors(folder).items()}
    return with_unpacked_shapes(shapes, read_quantisation(folder))
