"""Compiles the C kernels: a library for each level of vector instructions, kept under the digest of its sources.

Needs the standard library alone, as it runs at installation too (`setup.py`), where nothing else is there yet.
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
"""Flags of one kernel, which come last: `choice` computes the same bits whether or not there are fused products."""
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
"""Kernels of which a level's library has others in bfloat16, for CPUs that multiply it in pairs (AVX512-BF16) or in
tiles (AMX), and the flags for them. A compiler or assembler that does not know them makes a library without.
"""
LEVELS: dict[str, tuple[str, ...]] = X86 if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}
TIMEOUT_S = 300
PLACE = "compiling-"  # prefix of the folders in which libraries are compiled


class BuildError(RuntimeError):
    """The kernels cannot be compiled; the message says what the compiler did."""


def sources() -> list[Path]:
    """The C files, one of each kernel and those that they share."""
    return sorted(HERE.glob("*/*.c"))


def digest(level: str, extra: Sequence[str] = ()) -> str:
    """Of everything that the library of a level is made of."""
    made = hashlib.sha256(f"{' '.join([*FLAGS, *LEVELS[level], *extra])} {OF_KERNEL} {VARIANTS}".encode())
    for path in sorted([*sources(), *HERE.glob("*/*.h")]):
        made.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()[:16]


def file_of(level: str, extra: Sequence[str] = ()) -> str:
    """The name of the library of a level."""
    return f"aerie-{level}-{digest(level, extra)}.so"


def compiler() -> str | None:
    """The C compiler: `CC`, or the first of cc, gcc and clang that is there."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name))), None)


def compile_level(level: str, folder: Path, extra: Sequence[str] = ()) -> Path:
    """The library of `level` in `folder`, compiled unless it is there; `extra` are more flags. Of several processes
    that need it at once, as the ranks of a host, one compiles it.

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
        if made.exists():
            return made
        commands = _commands(cc, level, place, extra)
        variants = [_commands(cc, level, place, extra, name) for name in VARIANTS.get(level, {})]
        with ThreadPoolExecutor(os.cpu_count()) as several:
            tries = [[several.submit(_ran, each) for each in variant] for variant in variants]
            list(several.map(_ran, commands))
        for variant, tried in zip(variants, tries, strict=True):
            commands += [] if any(each.exception() for each in tried) else variant
        objects = [command[-1] for command in commands]
        _ran([cc, "-shared", *extra, *objects, "-lm", "-o", f"{place}/made.so"])
        Path(f"{place}/made.so").replace(made)
    return made


def _remove_left(folder: Path, own: Path) -> None:
    """Remove what processes that were killed amid compiling have left; the caller is alone in the folder."""
    for place in folder.glob(f"{PLACE}*"):
        if place != own:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """While this lasts, other processes that ask for the same wait. Yields False where files cannot be locked."""
    held, locked = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
            locked = True
        yield locked
    finally:
        os.close(held)


def _commands(cc: str, level: str, place: str, extra: Sequence[str], variant: str = "") -> list[list[str]]:
    """What compiles the kernels for each kind of number, or those that a variant has of its own; objects come last."""
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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{' '.join(command)} took over {TIMEOUT_S} s") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def compile_all(folder: Path = COMPILED) -> list[Path]:
    """The libraries of all levels of this architecture."""
    return [compile_level(level, folder) for level in LEVELS]


if __name__ == "__main__":
    for path in compile_all():
        print(path)
