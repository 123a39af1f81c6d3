"""One log for a whole server: all its processes on a machine append whole lines to the same file.

A line has the time (UTC), the level, the logger and, where known, the rank of the process and the id of the request. In
the format `json`, each line is one object with the same values. Aerie's own loggers write INFO and above, loggers of
other libraries WARNING and above. The file stays after the server has ended. This module does not import Ray.
"""

import fcntl
import json
import logging
import os
import re
import stat
import sys
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.config import ConfigError
from cluster.paths.cache_folder import cache_folder

LogFormat = Literal["text", "json"]

FOLDER = "logs"  # in `cache_folder()`
LIMIT_BYTES = 64 << 20  # a file that reaches this size is renamed to FILE.1, which replaces an older FILE.1
MAX_LOGS = 20  # how many log files of `aerie serve` the default folder keeps: the latest ones
OWN_LOGGER = "cluster"
SERVE_LOGGER = "ray.serve"  # Serve's logger; in a replica, its records do not propagate to the root logger

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the current task serves; empty outside a request."""

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_installed: list[tuple[logging.Logger, logging.Handler]] = []


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The absolute path of the log, and the format of its lines."""

    path: str
    format: LogFormat = "text"


def default_path(name: str) -> Path:
    """Return the path of the log `name` in the default folder.

    Raises:
        ConfigError: no cache folder can be used.
    """
    return cache_folder() / FOLDER / f"{name}.log"


def remove_old_logs(folder: Path, max_logs: int = MAX_LOGS) -> None:
    """Remove all but the `max_logs` latest logs of `aerie serve` in a folder; files with other names stay."""
    logs: list[tuple[float, Path]] = []
    for path in folder.glob("serve-*.log*"):
        with suppress(OSError):  # another server that starts may have removed the file
            logs.append((path.stat().st_mtime, path))
    for _, path in sorted(logs, reverse=True)[max_logs:]:
        with suppress(OSError):
            path.unlink()


def configure(settings: LogSettings, *, rank: int | None = None, to_stderr: bool = True) -> None:
    """Make this process write to the log. A second call replaces the handlers of the first.

    With `to_stderr`, warnings also go to stderr; Ray redirects the stderr of each of its processes to a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        handlers: list[logging.Handler] = [SharedFile(settings.path)]
    except OSError as error:
        raise ConfigError(f"log_file {settings.path!r} cannot be written: {error.strerror}; set log_file") from None
    if to_stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
        handlers[1].setLevel(logging.WARNING)
    for logger, handler_before in _installed:
        logger.removeHandler(handler_before)
        handler_before.close()
    _installed.clear()
    formatter = (JsonLines if settings.format == "json" else TextLines)(rank)
    for handler in handlers:
        handler.setFormatter(formatter)
        handler.addFilter(_should_log)
        _installed.append((logging.getLogger(), handler))
    if (last_logger := _last_logger(SERVE_LOGGER)) is not logging.getLogger():
        _installed.append((last_logger, Relay(handlers[0])))
    for logger, handler in _installed:
        logger.addHandler(handler)
    logging.getLogger(OWN_LOGGER).setLevel(logging.INFO)


def _last_logger(name: str) -> logging.Logger:
    """Return the last logger that a record of `name` reaches: the root, or a logger that does not propagate."""
    logger = logging.getLogger(name)
    while logger.propagate and logger.parent is not None:
        logger = logger.parent
    return logger


def _should_log(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] == OWN_LOGGER


class Relay(logging.Handler):
    """Passes records to `target`, a handler of another logger. The target applies its own filters and format.

    The log's own handler cannot be added to Ray's loggers: `ray.init` would replace the handler's format by Ray's.
    """

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record to the target handler."""
        self._target.handle(record)


class SharedFile(logging.Handler):
    """Appends each line with one write, so that lines of several processes do not mix; rotates at a size limit.

    Only the owner may read the file. It holds ids and sizes of requests, but no prompts.
    """

    def __init__(self, path: str, limit_bytes: int = LIMIT_BYTES) -> None:
        """Raises OSError if the file cannot be opened."""
        super().__init__()
        self._path = path
        self._limit_bytes = limit_bytes
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record, or nothing after `close`. `logging` reports a failure on stderr."""
        if self._file < 0:
            return
        try:
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
            if not self._is_current():
                old_file, self._file = self._file, self._open()
                os.close(old_file)
            os.write(self._file, line)
            self._rotate()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the file. Later calls do not close it again: its descriptor's number may be another file's then."""
        self.acquire()
        try:
            old_file, self._file = self._file, -1
            if old_file >= 0:
                os.close(old_file)
        finally:
            self.release()
        super().close()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_current(self) -> bool:
        """Return whether the open file still has this path: another process may have renamed it and made a new one."""
        try:
            path_status = Path(self._path).stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(path_status, os.fstat(self._file))

    def _rotate(self) -> None:
        status = os.fstat(self._file)
        if status.st_size < self._limit_bytes or not stat.S_ISREG(status.st_mode):
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)  # without the lock, a second process might rename the new file
        try:
            if self._is_current():
                Path(self._path).replace(f"{self._path}.1")
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class TextLines(logging.Formatter):
    """Formats a record as `TIME LEVEL LOGGER [rank R] [request ID] message`. Further lines of the message and the lines
    of a traceback are indented.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record. Control characters are escaped, because clients may have sent them."""
        parts = [_time(record), record.levelname, record.name]
        if self._rank is not None:
            parts.append(f"[rank {self._rank}]")
        if request := request_id.get():
            parts.append(f"[request {request}]")
        parts.append(record.getMessage())
        if fields := getattr(record, "fields", None):
            parts += [f"{name}={value}" for name, value in fields.items() if value is not None]
        text = " ".join(parts)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text).replace("\n", "\n    ")


class JsonLines(logging.Formatter):
    """Formats a record as one line with a JSON object: time, level, logger, message and, where known, rank, request_id
    and exception. The `fields` of a record become further keys of the object.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        data: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._rank is not None:
            data["rank"] = self._rank
        if request := request_id.get():
            data["request_id"] = request
        if record.exc_info:
            data["exception"] = self.formatException(record.exc_info)
        data |= getattr(record, "fields", {})
        return json.dumps(data)


def _time(record: logging.LogRecord) -> str:
    """Return the UTC time of a record, from `created` alone: Ray's record factory changes `created` but not `msecs`."""
    seconds, milliseconds = divmod(int(record.created * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"


def level_and_logger(line: str) -> tuple[int, str]:
    """Return the level and the logger of a log line in either format; 0 and "" for a line that begins no record."""
    if line.startswith("{"):
        try:
            data = json.loads(line)
            parts = ["", data["level"], data["logger"]]
        except (ValueError, KeyError):
            return 0, ""
    else:
        parts = line.split(" ", 3)
    level = logging.getLevelNamesMapping().get(parts[1], 0) if len(parts) > 2 else 0
    return level, parts[2] if level else ""


class LogFollower:
    """Reads the lines that are appended to a log after this object is constructed."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._inode, self._offset = self._state()
        self._partial_line = ""

    def _state(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return 0, 0
        return status.st_ino, status.st_size

    def lines(self) -> list[str]:
        """Return the complete lines written since the previous call. If the file was rotated since then, the lines
        written before the rotation are lost.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode:
                    self._inode, self._offset, self._partial_line = status.st_ino, 0, ""
                file.seek(self._offset)
                data = file.read(max(0, status.st_size - self._offset))
        except FileNotFoundError:  # the file was rotated, and no process has created the next one yet
            self._inode, self._offset, self._partial_line = 0, 0, ""
            return []
        except OSError:
            return []
        self._offset += len(data)
        *complete_lines, self._partial_line = (self._partial_line + data.decode(errors="replace")).split("\n")
        return complete_lines


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
