"""Copies of tiny checkpoints with changed tensors or config keys."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def copy_of(folder: str, destination: Path, change: Callable[[Tensors], None] | None = None, **config: object) -> str:
    """Copy the checkpoint in `folder` to `destination` and return that path.

    `change` changes the tensors in place. `config` replaces config keys; a value of None drops its key.
    """
    shutil.copytree(folder, destination)
    if change is not None:
        stored_tensors = load_file(destination / "model.safetensors")
        change(stored_tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in stored_tensors.items()}, destination / "model.safetensors"
        )
    config_dict = json.loads((destination / "config.json").read_text()) | config
    (destination / "config.json").write_text(
        json.dumps({key: value for key, value in config_dict.items() if value is not None})
    )
    return str(destination)
