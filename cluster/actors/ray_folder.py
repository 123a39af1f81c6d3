"""The temporary folder of a local Ray: accessible to its user only, and removed when its owner ends.

Ray makes its folder accessible to everyone, so it is put inside a folder that only the user may enter. A killed process
cannot remove its folder; the next process that starts a local Ray removes it (`remove_orphans`).
"""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "aerie-"
SUBFOLDER = "r"  # one letter, because the length of the paths of Ray's sockets is limited
OWNER_FILE = "owner"  # a file in the folder that the process that made it keeps locked as long as the process lives
SOCKET_LIMIT = 107  # characters that Linux allows in the path of a Unix socket
SOCKET_TAIL = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store") + 4


class OwnedFolder:
    """A new folder in the system's temporary folder; Ray uses the subfolder `ray_folder`."""

    def __init__(self) -> None:
        """Create and lock the folder. Raises RuntimeError if the path of the system's temporary folder is too long for
        Ray's sockets.
        """
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))  # accessible to the user only (0700)
        self.ray_folder = self.path / SUBFOLDER
        if len(str(self.ray_folder)) + SOCKET_TAIL > SOCKET_LIMIT:
            self.path.rmdir()
            raise RuntimeError(
                f"the path of the temporary folder {tempfile.gettempdir()!r} is too long for Ray's sockets; set TMPDIR "
                "to a shorter one, such as /tmp"
            )
        self.ray_folder.mkdir()
        unlocked = self.path / f"{OWNER_FILE}.new"
        self._lock: int | None = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The file is locked before it gets this name, so `remove_orphans` never finds it unlocked.
        unlocked.rename(self.path / OWNER_FILE)

    def remove(self) -> None:
        """Remove the folder with its contents. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_orphans() -> list[Path]:
    """Remove this user's folders whose owners are gone; return the removed ones.

    A folder is an orphan only if this user alone has access to it and its owner file exists and is not locked.
    """
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                continue
            lock = os.open(path / OWNER_FILE, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(lock)
    return removed
