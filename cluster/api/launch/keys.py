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

from cluster.api.core.api_keys import NAME_PATTERN, ApiKey, Scope, digest_of, parse_keys, read_keys_file
from cluster.config import ConfigError

PREFIX = "sk-aerie-"  # people and scanners for leaked secrets recognise a key by it
RANDOM_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `aerie keys` and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, help_text in (
        ("create", "make a key, print it, and add its hash to FILE; it is shown this once"),
        ("list", "show names and scopes of the keys in FILE"),
        ("remove", "remove a key from FILE: within a second it is not valid any more"),
    ):
        action_parser = actions.add_parser(
            action, help=help_text, description=help_text[0].upper() + help_text[1:] + "."
        )
        action_parser.add_argument(
            "file", metavar="FILE", type=Path, help="the keys file, as for aerie serve --api-keys-file"
        )
        if action != "list":
            action_parser.add_argument(
                "name", metavar="NAME", help="whose key it is: 1 to 64 letters, digits or any of . _ @ -"
            )
        if action == "create":
            action_parser.add_argument(
                "--scope", choices=get_args(Scope), default="use", help="admin: control and inspect too (default: use)"
            )


def run(args: argparse.Namespace) -> int:
    """Create, list or remove keys; return exit code 0.

    Raises:
        ConfigError: the file cannot be used, the name to create exists already, or the name to remove does not exist.
    """
    try:
        if args.action == "create":
            print(create(args.file, args.name, args.scope))
            print(f"aerie keys: the key is shown this once; {args.file} holds its hash", file=sys.stderr)
        elif args.action == "remove":
            remove(args.file, args.name)
        else:
            for key in read_keys_file(args.file):
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
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"NAME must be 1 to 64 letters, digits or any of . _ @ -, got {name!r}")
    token = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)

    def append_key(text: str) -> str:
        if any(key.name == name for key in parse_keys(text, str(file))):
            raise ConfigError(f"{file} has a key {name!r} already; remove it, or choose another name")
        existing_lines = f"{text}\n" if text and not text.endswith("\n") else text
        return existing_lines + ApiKey(name, scope, digest_of(token.encode())).to_line()

    _rewrite(file, append_key)
    return token


def remove(file: Path, name: str) -> None:
    """Remove the key `name` from a keys file. Comments on other lines stay.

    Raises:
        ConfigError: the file has no such key, or is not a keys file.
        OSError: the file cannot be written.
    """

    def drop_key(text: str) -> str:
        if not any(key.name == name for key in parse_keys(text, str(file))):
            raise ConfigError(f"{file} has no key {name!r}; `aerie keys list {file}` shows those it has")
        return "".join(line for line in text.splitlines(keepends=True) if line.split()[:1] != [name])

    _rewrite(file, drop_key)


def _rewrite(file: Path, edit: Callable[[str], str]) -> None:
    """Replace the text of a file by `edit(text)`, atomically: a server reads the old or the new text. The owner and the
    permissions of an existing file stay. A missing file counts as empty, and is created for its owner alone.
    """
    file = file.resolve()
    with _folder_lock(file.parent):
        text = file.read_bytes().decode() if file.exists() else ""
        new_text = edit(text)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # with permissions 0600
        try:
            with os.fdopen(descriptor, "w") as out:
                if file.exists():
                    old_stat = file.stat()
                    os.fchown(descriptor, old_stat.st_uid, old_stat.st_gid)
                    os.fchmod(descriptor, old_stat.st_mode & 0o777)
                out.write(new_text)
                out.flush()
                os.fsync(descriptor)
            Path(temporary).replace(file)
        except BaseException:
            Path(temporary).unlink()
            raise


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the block, so that two processes do not overwrite each other's changes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
