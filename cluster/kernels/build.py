"""Compilation of the C kernels: one library for each level of vector instructions, named by the digest of its sources.

It uses the standard library only, because `setup.py` also runs it at installation, before dependencies exist.
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

HERE = Path(__file__).resolve().parent
COMPILED = HERE / "compiled"
KINDS = {"f64": 64, "f32": 32, "bf16": 16}
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=default", "-Wno-psabi")
OF_KERNEL = {"choice": ("-ffp-contract=off",)}
"""Extra flags of single kernels, given after all others. `choice` must give the same bits with and without FMA."""
X86 = {
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
LEVELS: dict[str, tuple[str, ...]] = X86 if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}
TIMEOUT_S = 300
PLACE = "compiling-"  # prefix of the temporary folders in which libraries are compiled


class BuildError(RuntimeError):
    """The kernels cannot be compiled; the message has the compiler's output."""


def sources() -> list[Path]:
    """Return the C files: those of the kernels, and the shared ones in `c/`."""
    return sorted(HERE.glob("*/*.c"))


def digest(level: str, extra: Sequence[str] = ()) -> str:
    """Return a digest of all inputs of a level's library: flags, sources and headers."""
    made = hashlib.sha256(f"{' '.join([*FLAGS, *LEVELS[level], *extra])} {OF_KERNEL} {VARIANTS}".encode())
    for path in sorted([*sources(), *HERE.glob("*/*.h")]):
        made.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()[:16]


def file_of(level: str, extra: Sequence[str] = ()) -> str:
    """Return the file name of a level's library."""
    return f"aerie-{level}-{digest(level, extra)}.so"


def compiler() -> str | None:
    """Return the C compiler: `CC`, or the first of cc, gcc and clang that is found; None if there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name))), None)


def compile_level(level: str, folder: Path, extra: Sequence[str] = ()) -> Path:
    """Return the library of `level` in `folder`, and compile it if it does not exist; `extra` are additional flags. If
    several processes need it at the same time, as the ranks of a host do, one process compiles and the others wait.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: `folder` cannot be written.
    """
    made = folder / file_of(level, extra)
    if made.exists():
        return made
    if (cc := compiler()) is None:
        raise BuildError("there is no C compiler; install gcc or clang, or set CC")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder) as alone, tempfile.TemporaryDirectory(prefix=PLACE, dir=folder) as place:
        if alone:
            _remove_left(folder, Path(place))
        if made.exists():  # another process compiled it while this one waited for the lock
            return made
        commands = _commands(cc, level, place, extra)
        variants = [_commands(cc, level, place, extra, name) for name in VARIANTS.get(level, {})]
        with ThreadPoolExecutor(os.cpu_count()) as several:
            tries = [[several.submit(_ran, each) for each in variant] for variant in variants]
            list(several.map(_ran, commands))
        for variant, tried in zip(variants, tries, strict=True):  # a variant is linked only if all of it compiled
            commands += [] if any(each.exception() for each in tried) else variant
        objects = [command[-1] for command in commands]
        _ran([cc, "-shared", *extra, *objects, "-lm", "-o", f"{place}/made.so"])
        Path(f"{place}/made.so").replace(made)  # atomic: no process ever loads a library that is half written
    return made


def _remove_left(folder: Path, own: Path) -> None:
    """Remove the temporary folders of processes that were killed while compiling. The caller must hold the lock."""
    for place in folder.glob(f"{PLACE}*"):
        if place != own:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Hold a lock on `folder`, for which other processes wait. Yields False on file systems without locks."""
    held, locked = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
            locked = True
        yield locked
    finally:
        os.close(held)


def _commands(cc: str, level: str, place: str, extra: Sequence[str], variant: str = "") -> list[list[str]]:
    """Return the compile commands for all kernels and number kinds, or for those of a `variant`.

    The last argument of each command is its object file.
    """
    own, more = VARIANTS[level][variant] if variant else ((), ())
    commands = []
    for path in sources():
        kernel = path.parent.name
        if variant and kernel not in own:
            continue
        kinds = {"": 0} if kernel == "c" else {"bf16": KINDS["bf16"]} if variant else KINDS
        flags = [*FLAGS, *LEVELS[level], *extra, *OF_KERNEL.get(kernel, ()), *more]
        commands += [
            [cc, *flags, f"-DKIND={kind}", "-c", str(path), "-o", f"{place}/{path.stem}{name}{variant}.o"]
            for name, kind in kinds.items()
        ]
    return commands


def _ran(command: list[str]) -> None:
    """Run a compiler command; raise `BuildError` if it fails or takes over `TIMEOUT_S`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{' '.join(command)} took over {TIMEOUT_S} s") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def compile_all(folder: Path = COMPILED) -> list[Path]:
    """Compile and return the libraries of all levels of this architecture."""
    return [compile_level(level, folder) for level in LEVELS]


if __name__ == "__main__":
    for path in compile_all():
        print(path)
