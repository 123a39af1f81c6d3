"""A hash of everything outside the checkout on which the outcome of a test depends: Python, installed packages, the CPU
and GPUs, the C compiler and environment variables.
"""

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
"""Increase this number after a mistake in the ledger that may have recorded false passes: it makes all earlier passes
invalid.
"""
VARIABLES = frozenset({
    *("OVERLAP", "TIMED", "BACKEND", "KV_CACHE_DTYPE", "LAYERS", "ACCEPT", "BREAK", "SEED"),
    *("CC", "CFLAGS", "LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "PYTHONPATH", "PYTHONHASHSEED", "NO_COLOR"),
    *("LANG", "LC_ALL", "TZ", "PYTEST_ADDOPTS"),
})  # fmt: skip
PREFIXES = (
    *("AERIE_", "ATEN_", "CUDA_", "DNNL_", "FLASHINFER_", "GOMP_", "HF_", "HYPOTHESIS_", "KMP_", "MALLOC_", "MKL_"),
    *("NCCL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "RAY_", "TORCH_", "TRITON_", "VLLM_"),
)
IGNORED = frozenset({"PATH", "TERM", "SETTINGS_LOG", "XDG_CACHE_HOME", "HOME", "NOTED_FAILURES", "PLANTED_OBJECTS"})
"""Variables that tests or the product read, but on which no outcome depends: paths, and settings of the terminal."""


def counts(variable: str) -> bool:
    """Whether outcomes may depend on this variable, so that a pass holds only for the value that it was made with."""
    return variable in VARIABLES or variable.startswith(PREFIXES)


def surroundings() -> str:
    """Return the hash, with the present values of the environment variables."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if counts(name)]
    parts = [FORMAT, *_python(), *_processors(), _compiler(), *_packages(), *variables]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _python() -> list[str]:
    return [sys.version, str(sys.flags.optimize), str(sys.flags.dev_mode), platform.machine(), *platform.libc_ver()]


def _processors() -> list[str]:
    """The kind of CPU with its vector instructions, how many this process may use, and the GPUs."""
    try:
        cpu_text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        cpu_text = platform.processor()
    kinds = sorted(
        {line.strip() for line in re.findall(r"^(?:model name|flags|Features)\s*:.*$", cpu_text, re.MULTILINE)}
    )
    nvidia = [Path("/proc/driver/nvidia/version"), *sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    gpus = [path.read_text(encoding="utf-8") for path in nvidia if path.exists()]
    return [*kinds, str(len(os.sched_getaffinity(0))), *gpus]


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return "no compiler"
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _packages() -> list[str]:
    return sorted({f"{each.name}=={each.version}" for each in distributions()})
