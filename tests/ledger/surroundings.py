"""What the outcome of a test depends on beside the files of the checkout: Python, packages, the CPU, variables."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

FORMAT = "1"
"""Raised when a mistake in the ledger may have recorded passes that were none: nothing recorded before counts."""
VARIABLES = frozenset({
    *("OVERLAP", "BACKEND", "KV_CACHE_DTYPE", "LAYERS", "ACCEPT", "BREAK", "SEED"),
    *("CC", "CFLAGS", "LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "PYTHONPATH", "PYTHONHASHSEED", "NO_COLOR"),
    *("LANG", "LC_ALL", "TZ", "PYTEST_ADDOPTS"),
})  # fmt: skip
PREFIXES = (
    *("AERIE_", "ATEN_", "CUDA_", "DNNL_", "FLASHINFER_", "GOMP_", "HF_", "HYPOTHESIS_", "KMP_", "MALLOC_", "MKL_"),
    *("NCCL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "RAY_", "TORCH_", "TRITON_", "VLLM_"),
)
IGNORED = frozenset({"PATH", "TERM", "SAID", "XDG_CACHE_HOME", "HOME", "NOTED_FAILURES", "PLANTED_OBJECTS"})
"""Variables that tests or the product read, and on which no outcome depends: places, and looks of a terminal."""


def counts(variable: str) -> bool:
    """Whether a pass under one value of this variable says nothing about another."""
    return variable in VARIABLES or variable.startswith(PREFIXES)


def surroundings() -> str:
    """Return a hash of all of it, under the variables as they are now."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if counts(name)]
    parts = [FORMAT, *_python(), *_processors(), _compiler(), *_packages(), *variables]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _python() -> list[str]:
    return [sys.version, str(sys.flags.optimize), str(sys.flags.dev_mode), platform.machine(), *platform.libc_ver()]


def _processors() -> list[str]:
    """The kind of CPU with its vector instructions, how many this process may use, and the GPUs."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        said = platform.processor()
    kinds = sorted({line.strip() for line in re.findall(r"^(?:model name|flags|Features)\s*:.*$", said, re.MULTILINE)})
    nvidia = [Path("/proc/driver/nvidia/version"), *sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    gpus = [path.read_text(encoding="utf-8") for path in nvidia if path.exists()]
    return [*kinds, str(len(os.sched_getaffinity(0))), *gpus]


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if found is None:
        return "no compiler"
    return subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout


def _packages() -> list[str]:
    return sorted({f"{each.name}=={each.version}" for each in distributions()})
