"""Compiles the C kernels: a library for each level of vector instructions, kept under the digest of its sources.

Needs the standard library alone, as it runs at installation too (`setup.py`), where nothing else is there yet.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
PAIRS = {"avx512": (("codes", "product"), "-mavx512bf16")}
"""Kernels of which a level's library has others for CPUs that multiply bfloat16 in pairs, and the flag for them."""
LEVELS: dict[str, tuple[str, ...]] = X86 if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}
TIMEOUT_S = 300


class BuildError(RuntimeError):
    """The kernels cannot be compiled; the message says what the compiler did."""


def sources() -> list[Path]:
    """The C files, one of each kernel and those that they share."""
    return sorted(HERE.glob("*/*.c"))


def digest(level: str, extra: Sequence[str] = ()) -> str:
    """Of everything that the library of a level is made of."""
    made = hashlib.sha256(f"{' '.join([*FLAGS, *LEVELS[level], *extra])} {OF_KERNEL} {PAIRS}".encode())
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
    """The library of `level` in `folder`, compiled unless it is there; `extra` are more flags.

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
    with tempfile.TemporaryDirectory(dir=folder) as place:
        jobs, objects = [], []
        for path in sources():
            kernel = path.parent.name
            flags = [*FLAGS, *LEVELS[level], *extra, *OF_KERNEL.get(kernel, ())]
            kinds = {name: [f"-DKIND={kind}"] for name, kind in KINDS.items()} if kernel != "c" else {"": ["-DKIND=0"]}
            if level in PAIRS and kernel in PAIRS[level][0]:
                kinds["bf16_pairs"] = [*kinds["bf16"], PAIRS[level][1]]
            for name, own in kinds.items():
                objects.append(f"{place}/{path.stem}{name}.o")
                jobs.append([cc, *flags, *own, "-c", str(path), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as several:
            list(several.map(_ran, jobs))
        _ran([cc, "-shared", *extra, *objects, "-lm", "-o", f"{place}/made.so"])
        Path(f"{place}/made.so").replace(made)
    return made


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
