"""Finds the source checkout from which this package was imported, and the demo in it. An installation has neither."""

import os
from pathlib import Path

from cluster.config import ConfigError

HOME_VARIABLE = "AERIE_HOME"
CHECKOUT = Path(__file__).resolve().parents[2]
DEMO_CONFIG = "deploy/local.yaml"
DEMO_TARGET, DEMO_DRAFT = "models/demo/target", "models/demo/draft"


def search_folders() -> tuple[Path, ...]:
    """Return the folders in which relative paths of a config are searched, in order: AERIE_HOME, the working directory,
    the checkout. An installed package has no checkout: there is no pyproject.toml beside it.
    """
    home = (Path(os.environ[HOME_VARIABLE]),) if HOME_VARIABLE in os.environ else ()
    checkout = (CHECKOUT,) if (CHECKOUT / "pyproject.toml").is_file() else ()
    return (*home, Path.cwd(), *checkout)


def demo_path(name: str, alternative: str) -> str:
    """Return the absolute path of a file or folder of the demo, which only the source repository holds.

    Raises:
        ConfigError: it is not found; the message includes `alternative`, which says what to pass in its place.
    """
    for folder in search_folders():
        if (folder / name).exists():
            return str((folder / name).resolve())
    raise ConfigError(
        f"the demo is part of Aerie's source repository ({name} there) and not of this installation; {alternative}, or "
        f"set {HOME_VARIABLE} to a checkout"
    )
