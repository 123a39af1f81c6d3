"""`aerie keys`: creates, lists and removes API keys in a keys file. A running server notices changes by itself."""

import argparse
import fcntl
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from cluster.api.core.api_keys import NAME, ApiKey, Scope, digest_of, parse, read
from cluster.config import ConfigError

PREFIX = "sk-aerie-"  # people and scanners for leaked secrets recognise a key by it
RANDOM_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `aerie keys` and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, text in (
        ("create", "make a key, print it, and add its hash to FILE; it is shown this once"),
        ("list", "show names and scopes of the keys in FILE"),
        ("remove", "remove a key from FILE: within a second it is not valid any more"),
    ):
        sub = actions.add_parser(action, help=text, description=text[0].upper() + text[1:] + ".")
        sub.add_argument("file", metavar="FILE", type=Path, help="the keys file, as for aerie serve --api-keys-file")
        if action != "list":
            sub.add_argument("name", metavar="NAME", help="whose key it is: 1 to 64 letters, digits or any of . _ @ -")
        if action == "create":
            sub.add_argument(
                "--scope", choices=get_args(Scope), default="use", help="admin: control and inspect too (default: use)"
            )


def run(args: argparse.Namespace) -> int:
    """Create, list or remove keys; return exit code 0.

    Raises:
        ConfigError: the file cannot be used, the name to create exists already, or the name to remove does not.
    """
    try:
        if args.action == "create":
            print(create(args.file, args.name, args.scope))
            print(f"aerie keys: the key is shown this once; {args.file} holds its hash", file=sys.stderr)
        elif args.action == "remove":
            remove(args.file, args.name)
        else:
            for key in read(args.file):
                print(f"{key.name} {key.scope}")
    except OSError as error:
        raise ConfigError(f"{args.file}: {error.strerror}") from None
    return 0


def create(file: Path, name: str, scope: Scope) -> str:
    """Add a new key to a keys file and return the key. A missing file is created, readable by its owner alone.

    Raises:
        ConfigError: the name is invalid or exists already, or the file is not a keys file.
        OSError: the file cannot be written.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"NAME must be 1 to 64 letters, digits or any of . _ @ -, got {name!r}")
    token = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)

    def added(text: str) -> str:
        if any(key.name == name for key in parse(text, str(file))):
            raise ConfigError(f"{file} has a key {name!r} already; remove it, or choose another name")
        begun = f"{text}\n" if text and not text.endswith("\n") else text
        return begun + ApiKey(name, scope, digest_of(token.encode())).line()

    _rewrite(file, added)
    return token


def remove(file: Path, name: str) -> None:
    """Remove a key from a keys file; comments stay.

    Raises:
        ConfigError: the file has no such key, or is not a keys file.
        OSError: the file cannot be written.
    """

    def without(text: str) -> str:
        if not any(key.name == name for key in parse(text, str(file))):
            raise ConfigError(f"{file} has no key {name!r}; `aerie keys list {file}` shows those it has")
        return "".join(line for line in text.splitlines(keepends=True) if line.split()[:1] != [name])

    _rewrite(file, without)


def _rewrite(file: Path, change: Callable[[str], str]) -> None:
    """Replace the text of a file atomically: a server reads the old or the new text. Owner and permissions stay."""
    file = file.resolve()
    with _alone(file.parent):
        text = file.read_bytes().decode() if file.exists() else ""
        changed = change(text)
        descriptor, made = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # with permissions 0600
        try:
            with os.fdopen(descriptor, "w") as out:
                if file.exists():
                    was = file.stat()
                    os.fchown(descriptor, was.st_uid, was.st_gid)
                    os.fchmod(descriptor, was.st_mode & 0o777)
                out.write(changed)
                out.flush()
                os.fsync(descriptor)
            Path(made).replace(file)
        except BaseException:
            Path(made).unlink()
            raise


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the block, so that two processes do not overwrite each other's changes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
