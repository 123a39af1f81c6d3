"""Copies of tiny checkpoints with something changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def copy_of(folder: str, to: Path, tensors: Callable[[Tensors], None] | None = None, **config: object) -> str:
    """The checkpoint in `folder`, its tensors changed in place by `tensors` and config keys replaced (None drops)."""
    shutil.copytree(folder, to)
    if tensors is not None:
        held = load_file(to / "model.safetensors")
        tensors(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, to / "model.safetensors")
    given = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    return str(to)
