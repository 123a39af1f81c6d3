"""Compilation of the C kernels: one library for each level of vector instructions, named by the digest of its inputs.

This module imports the standard library only: `setup.py` runs it at installation, before dependencies are installed.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

KERNELS_FOLDER = Path(__file__).resolve().parent
COMPILED = KERNELS_FOLDER / "compiled"
NUMBER_KINDS = {"f64": 64, "f32": 32, "bf16": 16}
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=default", "-Wno-psabi")
KERNEL_FLAGS = {"choice": ("-ffp-contract=off",)}
"""Extra flags of some kernels, given after `FLAGS` and the flags of the level. `choice` must give the same bits with
and without FMA.
"""
X86_LEVELS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "baseline": (),
}
VARIANTS: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "avx512": {
        "pairs": (("codes", "product"), ("-mavx512bf16",)),
        "tiles": (("codes", "product"), ("-mavx512bf16", "-DTILES")),
    }
}
"""For each level, the variants of its library, as (kernels, flags). The kernels are compiled again in bfloat16, for
CPUs that multiply bfloat16 in pairs (AVX512-BF16) or tiles (AMX). If the compiler or assembler does not support a
variant, the library is made without that variant.
"""
LEVELS: dict[str, tuple[str, ...]] = X86_LEVELS if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}
TIMEOUT_S = 300
WORK_FOLDER_PREFIX = "compiling-"  # prefix of the temporary folders in which libraries are compiled


class BuildError(RuntimeError):
    """The kernels cannot be compiled; the message has the compiler's output."""


def sources() -> list[Path]:
    """Return the C files: those of the kernels, and the shared ones in `c/`."""
    return sorted(KERNELS_FOLDER.glob("*/*.c"))


def digest(level: str, extra_flags: Sequence[str] = ()) -> str:
    """Return a digest of all inputs of a level's library: flags, sources and headers."""
    hasher = hashlib.sha256(f"{' '.join([*FLAGS, *LEVELS[level], *extra_flags])} {KERNEL_FLAGS} {VARIANTS}".encode())
    for path in sorted([*sources(), *KERNELS_FOLDER.glob("*/*.h")]):
        hasher.update(path.relative_to(KERNELS_FOLDER).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


def library_name(level: str, extra_flags: Sequence[str] = ()) -> str:
    """Return the file name of a level's library."""
    return f"aerie-{level}-{digest(level, extra_flags)}.so"


def compiler() -> str | None:
    """Return the C compiler: `CC`, or the first of cc, gcc and clang that is found; None if there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((path for name in names if (path := shutil.which(name))), None)


def compile_level(level: str, folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """Return the path of the library of `level` in `folder`, and compile the library if it does not exist.
    `extra_flags` are added to the compiler's flags. If several processes need the library at the same time, as the
    ranks of a host do, one process compiles it and the others wait.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: `folder` cannot be written.
    """
    library_path = folder / library_name(level, extra_flags)
    if library_path.exists():
        return library_path
    if (cc := compiler()) is None:
        raise BuildError("there is no C compiler; install gcc or clang, or set CC")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        _lock_folder(folder) as locked,
        tempfile.TemporaryDirectory(prefix=WORK_FOLDER_PREFIX, dir=folder) as work_folder,
    ):
        if locked:
            _remove_stale_work_folders(folder, Path(work_folder))
        if library_path.exists():  # another process compiled it while this one waited for the lock
            return library_path
        commands = _commands(cc, level, work_folder, extra_flags)
        variants = [_commands(cc, level, work_folder, extra_flags, name) for name in VARIANTS.get(level, {})]
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            variant_jobs = [[executor.submit(_run_compiler, job) for job in variant] for variant in variants]
            list(executor.map(_run_compiler, commands))
        for variant, jobs in zip(variants, variant_jobs, strict=True):  # a variant is linked only if all of it compiled
            commands += [] if any(job.exception() for job in jobs) else variant
        objects = [command[-1] for command in commands]
        _run_compiler([cc, "-shared", *extra_flags, *objects, "-lm", "-o", f"{work_folder}/made.so"])
        Path(f"{work_folder}/made.so").replace(
            library_path
        )  # atomic: no process ever loads a library that is half written
    return library_path


def _remove_stale_work_folders(folder: Path, own_folder: Path) -> None:
    """Remove the temporary folders of processes that were killed while compiling. The caller must hold the lock."""
    for work_folder in folder.glob(f"{WORK_FOLDER_PREFIX}*"):
        if work_folder != own_folder:
            shutil.rmtree(work_folder, ignore_errors=True)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[bool]:
    """Wait for the lock on `folder`, and hold it. Yields whether it is held: False on a file system without locks."""
    descriptor, locked = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = True
        yield locked
    finally:
        os.close(descriptor)


def _commands(cc: str, level: str, work_folder: str, extra_flags: Sequence[str], variant: str = "") -> list[list[str]]:
    """Return the commands that compile all kernels in all number kinds. If `variant` is given, return only the commands
    that compile the kernels of that variant, in bfloat16.

    The last argument of each command is its object file.
    """
    variant_kernels, variant_flags = VARIANTS[level][variant] if variant else ((), ())
    commands = []
    for path in sources():
        kernel = path.parent.name
        if variant and kernel not in variant_kernels:
            continue
        kinds = {"": 0} if kernel == "c" else {"bf16": NUMBER_KINDS["bf16"]} if variant else NUMBER_KINDS
        flags = [*FLAGS, *LEVELS[level], *extra_flags, *KERNEL_FLAGS.get(kernel, ()), *variant_flags]
        commands += [
            [cc, *flags, f"-DKIND={kind}", "-c", str(path), "-o", f"{work_folder}/{path.stem}{name}{variant}.o"]
            for name, kind in kinds.items()
        ]
    return commands


def _run_compiler(command: list[str]) -> None:
    """Run a compiler command; raise `BuildError` if it fails or takes over `TIMEOUT_S`."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{' '.join(command)} took over {TIMEOUT_S} s") from None
    if completed.returncode:
        raise BuildError(f"{' '.join(command)} ended with {completed.returncode}:\n{completed.stderr}")


def compile_all(folder: Path = COMPILED) -> list[Path]:
    """Return the paths of the libraries of all levels of this CPU architecture; compile those that do not exist."""
    return [compile_level(level, folder) for level in LEVELS]


if __name__ == "__main__":
    for path in compile_all():
        print(path)
