"""The folder for files that stay after a server has ended: logs, and kernels compiled on this machine.

It is `aerie` in $XDG_CACHE_HOME, by default ~/.cache. A user without a writable home folder (an arbitrary user id in a
container, a read-only file system) gets a folder in the system's temporary folder instead.
"""

import os
import stat
import tempfile
from pathlib import Path

from cluster.config import ConfigError


def default_folder_problem() -> str:
    """Return why the usual folder cannot be used, or an empty text if it can. If the folder is missing, create it."""
    try:
        folder = _default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except RuntimeError:
        return "there is no home folder"
    except OSError as error:
        return f"{str(folder)!r} cannot be made: {error.strerror}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{str(folder)!r} cannot be written"


def cache_folder() -> Path:
    """Return the cache folder; it exists and is writable.

    Raises:
        ConfigError: neither the usual folder nor the temporary one can be used.
    """
    if not (problem := default_folder_problem()):
        return _default_folder()
    folder = Path(tempfile.gettempdir()) / f"aerie-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{problem}, and {str(folder)!r} cannot be made: {error.strerror}; set XDG_CACHE_HOME"
        ) from None
    # Everyone may create files in the temporary folder, so refuse a symlink or a folder that another user controls.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{problem}, and others can write {str(folder)!r}; set XDG_CACHE_HOME to a folder of your own"
        )
    return folder


def _default_folder() -> Path:
    """Return the usual folder. Raises RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aerie"
