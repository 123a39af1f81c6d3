"""The source checkout that this package was imported from, and the demo in it. An installed package has neither."""

import os
from pathlib import Path

from cluster.config import ConfigError

HOME = "AERIE_HOME"
CHECKOUT = Path(__file__).resolve().parents[1]
DEMO_CONFIG = "deploy/local.yaml"
DEMO_TARGET, DEMO_DRAFT = "models/demo/target", "models/demo/draft"


def homes() -> tuple[Path, ...]:
    """Where relative paths of a config are looked for, in this order: AERIE_HOME, the working directory, the checkout.

    What lies beside an installed package is no checkout.
    """
    home = (Path(os.environ[HOME]),) if HOME in os.environ else ()
    own = (CHECKOUT,) if (CHECKOUT / "pyproject.toml").is_file() else ()
    return (*home, Path.cwd(), *own)


def demo_path(name: str, instead: str) -> str:
    """A file or folder of the demo, which only the source repository holds.

    Raises:
        ConfigError: this installation has none; `instead` says what to pass without it.
    """
    for home in homes():
        if (home / name).exists():
            return str((home / name).resolve())
    raise ConfigError(
        f"the demo is part of Aerie's source repository ({name} there) and not of this installation; {instead}, or "
        f"set {HOME} to a checkout"
    )
