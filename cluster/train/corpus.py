"""The training text: the source of the Python standard library, split into train and held-out files.

A hash of a file's path relative to the library decides the split, so all CPython installations agree on it. `dataset`
turns the text into token ids.
"""

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

HELDOUT_PER_MILLE = 60  # of every thousand library files, how many are held out

TESTS_PER_MILLE = (
    150  # of every thousand test files, how many are used; all of them would be more text than the library itself
)

_EXCLUDED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "pydoc_data"})
_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test"})
_MIN_CHARACTERS = 400


@dataclass(frozen=True)
class ChatExample:
    """One question and its answer, both as plain text."""

    question: str
    answer: str


def library_root() -> Path:
    """Return the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _is_test(path: str) -> bool:
    return bool(_TEST_DIRECTORIES.intersection(path.split("/")[:-1]))


def _is_in_corpus(path: str) -> bool:
    """Return whether a file is part of the corpus. Installed packages, generated files and codec tables are not."""
    parts = path.split("/")
    if _EXCLUDED_DIRECTORIES.intersection(parts) or any(part.startswith("config-") for part in parts):
        return False
    if parts[-1].startswith("_sysconfigdata"):  # a generated file that describes the machine
        return False
    # The codecs are near-identical tables.
    return not (parts[0] == "encodings" and parts[-1] not in {"__init__.py", "idna.py", "punycode.py"})


def is_heldout(path: str) -> bool:
    """Return whether a file is held out. `path` is relative to the library and uses `/`."""
    return _hash(path) % 1000 < HELDOUT_PER_MILLE


def _all_files() -> list[str]:
    root = library_root()
    paths = (file.relative_to(root).as_posix() for file in root.rglob("*.py") if file.is_file())
    return sorted(path for path in paths if _is_in_corpus(path))


def heldout_files() -> list[str]:
    """Return the held-out library files (no tests), as sorted relative paths."""
    return [path for path in _all_files() if is_heldout(path) and not _is_test(path)]


def train_files() -> list[str]:
    """Return the library files and a fixed part of the library's tests, without held-out files."""
    return [
        path
        for path in _all_files()
        if not is_heldout(path) and (not _is_test(path) or _hash("test:" + path) % 1000 < TESTS_PER_MILLE)
    ]


def read_text(path: str) -> str | None:
    """Return the file's text with `\\n` line ends, or None if the file is unreadable, not UTF-8 or below
    `_MIN_CHARACTERS`.
    """
    try:
        text = (library_root() / path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return text if len(text) >= _MIN_CHARACTERS else None


def texts(paths: list[str]) -> Iterator[str]:
    """Yield the texts of the files, without those for which `read_text` returns None."""
    for path in paths:
        text = read_text(path)
        if text is not None:
            yield text


def chat_examples(paths: list[str], count: int, seed: int) -> list[ChatExample]:
    """Return up to `count` chats, in random order. A question has the name and the first docstring line of a function
    of the files `paths` (tests excepted); the answer is the function's source.
    """
    examples: list[ChatExample] = []
    for path in paths:
        text = None if _is_test(path) else read_text(path)
        if text is None:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.split("\n")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            docstring = ast.get_docstring(node)
            body = lines[node.lineno - 1 : node.end_lineno]
            source = "\n".join(_without_indent(line, node.col_offset) for line in body)
            if not docstring or not 120 <= len(source) <= 1600:
                continue
            first_line = docstring.strip().splitlines()[0]
            examples.append(ChatExample(f"Write the Python function `{node.name}`. {first_line}", source))
    random.Random(seed).shuffle(examples)
    return examples[:count]


def _without_indent(line: str, indent: int) -> str:
    return line[indent:] if not line[:indent].strip() else line


def heldout_prompts(tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of `length` token ids, cut from held-out files. `seed` decides the positions.

    The files take turns. Files with fewer than 2 * `length` tokens are skipped.

    Raises:
        ValueError: no held-out file is long enough.
    """
    usable: list[list[int]] = []
    for text in texts(heldout_files()):
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if len(ids) >= 2 * length:
            usable.append(ids)
        if len(usable) == count:
            break
    if not usable:
        raise ValueError(f"no held-out file has {2 * length} tokens: this Python comes without its library's source")
    prompts: list[list[int]] = []
    for index in range(count):
        ids = usable[index % len(usable)]
        start = _hash(f"{seed}:{index}") % (len(ids) - length)
        prompts.append(list(ids[start : start + length]))
    return prompts
