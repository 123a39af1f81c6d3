"""The layouts for GPUs that stand in the comments of deploy/serve.yaml."""

from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[2] / "deploy" / "serve.yaml"


def commented() -> list[Any]:
    """The YAML of the comments after the config itself, block by block."""
    text = FILE.read_text().split("\n# One host with eight GPUs", 1)[1]
    blocks = []
    for part in ("\n" + text).split("\n#\n"):
        lines = [line.removeprefix("#") for line in part.splitlines()]
        if all(line.startswith("   ") for line in lines if line.strip()):
            blocks.append(yaml.safe_load("\n".join(lines)))
    return blocks
