"""API keys: who may use the server, and with which scope. Only hashes of keys are stored.

A keys file has one key per line, `NAME SCOPE sha256:HEX`; `#` begins a comment. `aerie keys` writes such lines. The
hash is plain SHA-256, without salt or stretching: salt and stretching protect passwords, which can be guessed. Keys of
`aerie keys` have 256 random bits, so nobody who reads the file can find them by guessing or by tables. A check takes
microseconds. Keys that people choose can be guessed, so they belong in the environment, not in a file.

Requests make the server check the file, at most once a second; it is read again if it has changed. So keys are added
and removed without a restart. If the changed file cannot be read, the old keys stay valid. If it leaves no key,
everybody is refused.
"""

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from cluster.config import ConfigError

logger = logging.getLogger(__name__)

Scope = Literal["use", "admin"]
SCOPE_OF_VARIABLE: Mapping[str, Scope] = {"AERIE_API_KEY": "use", "AERIE_ADMIN_API_KEY": "admin"}
"""Environment variables that hold keys in plain text, separated by commas, and the scope of these keys."""
PROBE_PATHS = frozenset({"/health", "/ready"})
PAGE_PATHS = ("/", *(f"/page/{name}" for name in ("style.css", "icon.svg", "page.js", "server.js", "overview.js")))
PAGE_PATHS += tuple(f"/page/{name}" for name in ("chart.js", "playground.js", "steps.js", "tree.js", "dom.js"))
PATHS_WITHOUT_KEY = PROBE_PATHS | {*PAGE_PATHS}
"""Paths that need no key: probes send none, and browsers send none for the page's files, which hold no data."""
CHECK_INTERVAL_S = 1.0  # seconds between two checks of the file
MAX_FILE_BYTES = 1 << 20  # of a keys file
MIN_SAFE_CHARACTERS = 16  # a key of fewer characters can be guessed, and gives a warning
NAME_PATTERN = re.compile(r"[A-Za-z0-9._@-]{1,64}")
LINE_PATTERN = re.compile(rf"\s*({NAME_PATTERN.pattern})\s+({'|'.join(get_args(Scope))})\s+sha256:([0-9a-f]{{64}})\s*")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. `digest` is its SHA-256, which `repr` leaves out. Scope `admin` includes `use`."""

    name: str
    scope: Scope
    digest: bytes = field(repr=False)

    def to_line(self) -> str:
        """Return this key as a line of a keys file."""
        return f"{self.name} {self.scope} sha256:{self.digest.hex()}\n"


def digest_of(token: bytes) -> bytes:
    """Return the SHA-256 of a key. `token` is the key as clients send it."""
    return hashlib.sha256(token).digest()


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """Return the keys in the text of a keys file. Error messages begin with `source` and never quote a line.

    Raises:
        ConfigError: a line is not `NAME SCOPE sha256:HEX`, or a name or a key occurs twice.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0]
        match = LINE_PATTERN.fullmatch(content)
        if match is not None:
            keys.append(ApiKey(match[1], "admin" if match[2] == "admin" else "use", bytes.fromhex(match[3])))
        elif content.strip():
            raise ConfigError(
                f"{source}, line {number}: must be NAME SCOPE sha256:HEX, SCOPE being {' or '.join(get_args(Scope))}; "
                "`aerie keys create` makes such lines"
            )
    return _require_distinct(keys, source)


def _require_distinct(keys: Sequence[ApiKey], source: str) -> tuple[ApiKey, ...]:
    names, digests = set[str](), set[bytes]()
    for key in keys:
        if key.name in names or key.digest in digests:
            raise ConfigError(f"{source}: {key.name!r} is a name or a key that is there twice; remove one of them")
        names.add(key.name)
        digests.add(key.digest)
    return tuple(keys)


def read_keys_file(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file.

    Raises:
        ConfigError: `parse_keys` refuses the text, the text is not UTF-8, the file is too large or not regular, or
            every user of the machine may write it.
        OSError: the file cannot be read.
    """
    source, file_status = f"api_keys_file {str(path)!r}", path.stat()
    if not stat.S_ISREG(file_status.st_mode) or file_status.st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{source} must be a file of at most {MAX_FILE_BYTES} bytes")
    if file_status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{source} can be written by every user of the machine: chmod o-w it")
    try:
        return parse_keys(path.read_bytes().decode(), source)
    except UnicodeDecodeError:
        raise ConfigError(f"{source} is not text in UTF-8") from None


def keys_from_environment(environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Return the keys in the variables of `SCOPE_OF_VARIABLE`. Each key is named after its variable.

    Raises:
        ConfigError: a variable is set and holds no key, or a key that cannot be sent in a header.
    """
    keys: list[ApiKey] = []
    for variable, scope in SCOPE_OF_VARIABLE.items():
        tokens = [token.strip() for token in environment[variable].split(",")] if variable in environment else []
        for number, token in enumerate(tokens, 1):
            if not token or not all("!" <= character <= "~" for character in token):
                raise ConfigError(f"{variable} must hold keys of printable ASCII, with commas between; or unset it")
            if len(token) < MIN_SAFE_CHARACTERS:
                logger.warning(
                    "a key in %s has fewer than %d characters: it can be guessed", variable, MIN_SAFE_CHARACTERS
                )
            keys.append(ApiKey(variable if number == 1 else f"{variable}.{number}", scope, digest_of(token.encode())))
    return _require_distinct(keys, " and ".join(SCOPE_OF_VARIABLE))


class ApiKeys:
    """The keys of one process. An object is used on one event loop, which waits while the file is read."""

    def __init__(
        self, path: Path | None, static_keys: Sequence[ApiKey] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the file at `path`, if it is not None. The keys `static_keys` are always valid.

        Raises:
            ConfigError: the file is malformed, or there is no key at all.
            OSError: the file cannot be read.
        """
        self._path, self._static_keys, self._clock = path, tuple(static_keys), clock
        self._loaded_version, self._last_error = _file_version(path), ""
        self._keys = self._read_keys()
        if not self._keys:
            raise ConfigError(f"api_keys_file {str(path)!r} holds no key; make one: aerie keys create {path} NAME")
        self._last_check_at = clock()

    @classmethod
    def load(cls, path: str | None, environment: Mapping[str, str] = os.environ) -> "ApiKeys | None":
        """Return the keys of a file and of the environment, or None if neither is set.

        Raises:
            ConfigError: the file or a variable is set, and cannot be used.
        """
        environment_keys = keys_from_environment(environment)
        if path is None and not environment_keys:
            return None
        try:
            return cls(None if path is None else Path(path), environment_keys)
        except OSError as error:
            raise ConfigError(f"api_keys_file {path!r} cannot be read: {error.strerror}") from None

    def find(self, token: bytes) -> ApiKey | None:
        """Return the key that a client sent, or None if it is unknown. All keys are compared, so the time does not show
        which one matches.
        """
        self._reload_if_changed()
        digest, matching_key = digest_of(token), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                matching_key = key
        return matching_key

    def __str__(self) -> str:
        return ", ".join(f"{key.name} ({key.scope})" for key in self._keys)

    def _reload_if_changed(self) -> None:
        """Read the file again if it has changed. The same error is logged once, not every second."""
        now = self._clock()
        if self._path is None or now < self._last_check_at + CHECK_INTERVAL_S:
            return
        self._last_check_at, error_text = now, ""
        try:
            version = _file_version(self._path)
            if version != self._loaded_version:
                self._loaded_version = (
                    version  # set before reading: a malformed file is not read again until it changes
                )
                self._keys = self._read_keys()
                logger.info("the API keys are now: %s", self or "none, so that nobody is let in")
        except (OSError, ConfigError) as error:
            error_text = str(error)
            if error_text != self._last_error:
                logger.error("the API keys stay as they were: %s", error)
        self._last_error = error_text

    def _read_keys(self) -> tuple[ApiKey, ...]:
        if self._path is None:
            return self._static_keys
        return _require_distinct(
            [*read_keys_file(self._path), *self._static_keys], f"api_keys_file {str(self._path)!r} and the environment"
        )


def _file_version(path: Path | None) -> tuple[int, ...]:
    """Return numbers that identify a file's version: when the file is written or replaced, at least one number changes.
    The tuple is empty if `path` is None.
    """
    if path is None:
        return ()
    file_status = path.stat()
    return file_status.st_dev, file_status.st_ino, file_status.st_size, file_status.st_mtime_ns, file_status.st_ctime_ns


def is_loopback(host: str | None) -> bool:
    """Whether a server that listens on `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str | None, keys: ApiKeys | None, allow_unauthenticated: bool) -> None:
    """Refuse to start a server that has no keys and that other machines can reach, unless
    `allow_unauthenticated` is true.

    Raises:
        ConfigError: the server would be reachable without keys; the message names the settings that help.
    """
    if keys is None and not allow_unauthenticated and not is_loopback(host):
        raise ConfigError(
            f"http_host {host!r} is reachable from other machines and there are no API keys: set api_keys_file (`aerie "
            "keys create FILE NAME` makes one) or the variable AERIE_API_KEY, or use 127.0.0.1 behind a gateway; to "
            "serve everyone who reaches it, set allow_unauthenticated: true"
        )
