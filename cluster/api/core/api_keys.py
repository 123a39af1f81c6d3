"""API keys: who may use the server, and with which scope. Only hashes of keys are stored.

A keys file has one key per line, `NAME SCOPE sha256:HEX`; `#` begins a comment. `aerie keys` writes such lines. The
hash is plain SHA-256, without salt or stretching: salt and stretching protect passwords, which can be guessed. Keys of
`aerie keys` have 256 random bits, so nobody who reads the file can find them by guessing or by tables. A check takes
microseconds. Keys that people choose can be guessed, so they come from the environment, never from a file.

When a request comes, the file is checked at most once a second, and read again if it has changed. So keys are added and
removed without a restart. If a new file cannot be read, the old keys stay valid. Without any key, everybody is refused.
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
ENVIRONMENT: Mapping[str, Scope] = {"AERIE_API_KEY": "use", "AERIE_ADMIN_API_KEY": "admin"}
"""Environment variables that hold keys in plain text, separated by commas, and the scope of these keys."""
PROBED = frozenset({"/health", "/ready"})
PAGE = ("/", *(f"/page/{name}" for name in ("style.css", "icon.svg", "page.js", "server.js", "overview.js")))
PAGE += tuple(f"/page/{name}" for name in ("chart.js", "playground.js", "steps.js", "tree.js", "dom.js"))
OPEN = PROBED | {*PAGE}
"""Paths that need no key: probes send none, and browsers send none for the page's files, which hold no data."""
LOOK_S = 1.0  # seconds between two checks of the file
LARGEST = 1 << 20  # bytes of a keys file
EASY = 16  # a key of fewer characters can be guessed, and gives a warning
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
LINE = re.compile(rf"\s*({NAME.pattern})\s+({'|'.join(get_args(Scope))})\s+sha256:([0-9a-f]{{64}})\s*")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. `digest` is its SHA-256, which is never shown. Scope `admin` includes `use`."""

    name: str
    scope: Scope
    digest: bytes = field(repr=False)

    def line(self) -> str:
        """Return this key as a line of a keys file."""
        return f"{self.name} {self.scope} sha256:{self.digest.hex()}\n"


def digest_of(token: bytes) -> bytes:
    """Return the SHA-256 of a key, in the form that clients send."""
    return hashlib.sha256(token).digest()


def parse(text: str, where: str) -> tuple[ApiKey, ...]:
    """Return the keys in the text of a file; `where` names the file in errors, which quote no line.

    Raises:
        ConfigError: a line has another form, or a name or a key occurs twice.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0]
        found = LINE.fullmatch(said)
        if found is not None:
            keys.append(ApiKey(found[1], "admin" if found[2] == "admin" else "use", bytes.fromhex(found[3])))
        elif said.strip():
            raise ConfigError(
                f"{where}, line {number}: must be NAME SCOPE sha256:HEX, SCOPE being {' or '.join(get_args(Scope))}; "
                "`aerie keys create` makes such lines"
            )
    return _distinct(keys, where)


def _distinct(keys: Sequence[ApiKey], where: str) -> tuple[ApiKey, ...]:
    names, digests = set[str](), set[bytes]()
    for key in keys:
        if key.name in names or key.digest in digests:
            raise ConfigError(f"{where}: {key.name!r} is a name or a key that is there twice; remove one of them")
        names.add(key.name)
        digests.add(key.digest)
    return tuple(keys)


def read(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file.

    Raises:
        ConfigError: `parse` refuses the text, the file is too large or not regular, or every user may write it.
        OSError: the file cannot be read.
    """
    where, facts = f"api_keys_file {str(path)!r}", path.stat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > LARGEST:
        raise ConfigError(f"{where} must be a file of at most {LARGEST} bytes")
    if facts.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{where} can be written by every user of the machine: chmod o-w it")
    try:
        return parse(path.read_bytes().decode(), where)
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not text in UTF-8") from None


def of_environment(environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Return the keys in the variables of `ENVIRONMENT`. Each key is named after its variable.

    Raises:
        ConfigError: a variable is set and holds no key, or a key that cannot be sent in a header.
    """
    keys: list[ApiKey] = []
    for variable, scope in ENVIRONMENT.items():
        tokens = [token.strip() for token in environment[variable].split(",")] if variable in environment else []
        for number, token in enumerate(tokens, 1):
            if not token or not all("!" <= sign <= "~" for sign in token):
                raise ConfigError(f"{variable} must hold keys of printable ASCII, with commas between; or unset it")
            if len(token) < EASY:
                logger.warning("a key in %s has fewer than %d characters: it can be guessed", variable, EASY)
            keys.append(ApiKey(variable if number == 1 else f"{variable}.{number}", scope, digest_of(token.encode())))
    return _distinct(keys, " and ".join(ENVIRONMENT))


class ApiKeys:
    """The keys of one process. Used on one event loop; reading the file blocks that loop."""

    def __init__(
        self, path: Path | None, fixed: Sequence[ApiKey] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the file; the keys `fixed` are always valid.

        Raises:
            ConfigError, OSError: the file is malformed or cannot be read, or there is no key at all.
        """
        self._path, self._fixed, self._clock = path, tuple(fixed), clock
        self._seen, self._trouble = _version(path), ""
        self._keys = self._read()
        if not self._keys:
            raise ConfigError(f"api_keys_file {str(path)!r} holds no key; make one: aerie keys create {path} NAME")
        self._looked = clock()

    @classmethod
    def load(cls, path: str | None, environment: Mapping[str, str] = os.environ) -> "ApiKeys | None":
        """Return the keys of a file and of the environment, or None if neither is set.

        Raises:
            ConfigError: the file or a variable is set, and cannot be used.
        """
        fixed = of_environment(environment)
        if path is None and not fixed:
            return None
        try:
            return cls(None if path is None else Path(path), fixed)
        except OSError as error:
            raise ConfigError(f"api_keys_file {path!r} cannot be read: {error.strerror}") from None

    def find(self, token: bytes) -> ApiKey | None:
        """Return the key that a client sent, None if it is unknown. The time does not depend on which key matches."""
        self._look()
        digest, found = digest_of(token), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def __str__(self) -> str:
        return ", ".join(f"{key.name} ({key.scope})" for key in self._keys)

    def _look(self) -> None:
        """Read the file again if it has changed. The same error is logged once, not every second."""
        now = self._clock()
        if self._path is None or now < self._looked + LOOK_S:
            return
        self._looked, trouble = now, ""
        try:
            version = _version(self._path)
            if version != self._seen:
                self._seen = version  # set before reading: a malformed file is not read again until it changes
                self._keys = self._read()
                logger.info("the API keys are now: %s", self or "none, so that nobody is let in")
        except (OSError, ConfigError) as error:
            trouble = str(error)
            if trouble != self._trouble:
                logger.error("the API keys stay as they were: %s", error)
        self._trouble = trouble

    def _read(self) -> tuple[ApiKey, ...]:
        if self._path is None:
            return self._fixed
        return _distinct([*read(self._path), *self._fixed], f"api_keys_file {str(self._path)!r} and the environment")


def _version(path: Path | None) -> tuple[int, ...]:
    """Return facts about a file of which at least one changes when the file is written or replaced."""
    if path is None:
        return ()
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def is_loopback(host: str | None) -> bool:
    """Whether a server that listens on `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def check_reach(host: str | None, keys: ApiKeys | None, allowed: bool) -> None:
    """Refuse to start a server that has no keys and that other machines can reach. `allowed` permits such a server.

    Raises:
        ConfigError: the server would be reachable without keys; the message names the settings that help.
    """
    if keys is None and not allowed and not is_loopback(host):
        raise ConfigError(
            f"http_host {host!r} is reachable from other machines and there are no API keys: set api_keys_file (`aerie "
            "keys create FILE NAME` makes one) or the variable AERIE_API_KEY, or use 127.0.0.1 behind a gateway; to "
            "serve everyone who reaches it, set allow_unauthenticated: true"
        )
