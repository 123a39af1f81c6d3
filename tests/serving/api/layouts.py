"""The GPU layouts in the comments of deploy/serve.yaml."""

from pathlib import Path
from typing import Any

import yaml

SERVE_YAML = Path(__file__).resolve().parents[3] / "deploy" / "serve.yaml"


def commented_layouts() -> list[Any]:
    """The parsed YAML of each layout in the comments after the config, in the order of the file."""
    text = SERVE_YAML.read_text().split("\n# One host with eight GPUs", 1)[1]
    blocks = []
    for part in ("\n" + text).split("\n#\n"):
        lines = [line.removeprefix("#") for line in part.splitlines()]
        if all(line.startswith("   ") for line in lines if line.strip()):
            blocks.append(yaml.safe_load("\n".join(lines)))
    return blocks
