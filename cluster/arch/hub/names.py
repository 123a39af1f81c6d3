"""Names of models on a hub: NAME or ORGANISATION/NAME, optionally followed by @REVISION."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import validate_repo_id

from cluster.config import ConfigError

SCHEME = "hf://"
HUB_NAME = "its name on a hub, ORGANISATION/NAME or ORGANISATION/NAME@REVISION"
"""The end of help texts of options that accept a hub model."""
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub at a revision: a branch, a tag or a commit. `commit` is the full hash of the revision's commit,
    or empty until the revision is resolved.
    """

    name: str
    revision: str = "main"
    commit: str = ""

    def __str__(self) -> str:
        """Return the text that stands for this model in settings once the commit is known; `hub_model` parses this
        text.
        """
        return f"{SCHEME}{self.name}@{self.revision}" + (f"#{self.commit}" if self.commit else "")

    @property
    def display_name(self) -> str:
        """The name of this model in messages. Every command accepts it as the name of a model."""
        return f"{self.name}@{self.commit or self.revision}"


def hub_model(text: str) -> HubModel | None:
    """Return the hub model that `text` names, or None if `text` is a path.

    An existing file or folder is a path, whatever its name. With the prefix `hf://`, `text` is always a name.

    Raises:
        ConfigError: no valid name follows hf://, or nothing follows the @.
    """
    name, separator, revision = text.removeprefix(SCHEME).partition("@")
    has_scheme = text.startswith(SCHEME)
    try:
        validate_repo_id(name)
    except ValueError as error:
        if has_scheme:
            raise ConfigError(f"{text!r} does not name a model of a hub: {error}") from None
        return None
    if not has_scheme and Path(text).exists():
        return None
    if separator and not revision:
        raise ConfigError(f"{text!r} has no revision after its @; give a branch, a tag or a commit")
    commit = ""
    if has_scheme and COMMIT.fullmatch(revision.rpartition("#")[2]):
        revision, _, commit = revision.rpartition("#")
    elif COMMIT.fullmatch(revision):
        commit = revision
    return HubModel(name, revision or commit or "main", commit)


def name_of(folder: str) -> str:
    """Return the name of the model in `folder`. For a snapshot in a hub cache
    (models--ORGANISATION--NAME/snapshots/COMMIT), the name is ORGANISATION/NAME; otherwise it is the folder's name.
    """
    path = Path(folder)
    cache = path.parent.parent.name
    if path.parent.name == "snapshots" and cache.startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return path.name
