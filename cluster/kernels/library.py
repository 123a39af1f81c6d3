"""The compiled C kernels for this CPU, loaded once per process. They run on torch's threads."""

import ctypes
import logging
import platform
from collections.abc import Callable
from ctypes import CDLL, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from cluster.config import ConfigError
from cluster.kernels.build import COMPILED, LEVELS, VARIANTS, BuildError, compile_level, library_name
from cluster.kernels.joined import joiner_of
from cluster.paths.cache_folder import cache_folder

logger = logging.getLogger(__name__)
KIND_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16"}
LEVEL_OF_CAPABILITY = {"AVX512": "avx512", "AVX2": "avx2"}
VARIANT_CPU_FLAGS = {"tiles": {"amx_bf16", "amx_tile", "avx512_bf16"}, "pairs": {"avx512_bf16"}}
"""For each variant, the CPU flags in /proc/cpuinfo that it needs; the best variant first."""
ARGUMENT_TYPES = {"p": c_void_p, "i": c_int64, "d": c_double}  # letters of `SIGNATURES`: pointer, integer, double
SIGNATURES = {
    "product": "ppppiiipii",
    "codes": "ppppppiiiiiipii",
    "norm": "pppppiiiidi",
    "activate": "ppiiiddi",
    "rotary": "pppppiiiiiiiidi",
    "attend": "p",
    "choice": "p",
    "keys": "pppiii",
    "accept": "p",
    "select": "p",
    "level": "p",
    "keep": "p",
    "chances": "p",
    "count": "p",
    "match_chances": "p",
    "match_count": "p",
    "add_looked_up": "p",
    "append": "p",
    "continue": "p",
    "bar": "ppppiiiidi",
    "gather": "pppiiiii",
    "scatter": "pppiiii",
    "place": "ppiiii",
    "cells": "p",
    "numbers": "p",
    "move": "pppiiiipi",
}
Function = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of one compiled library, by kernel and dtype. `level` names its vector instructions.

    `variant` says how bfloat16 products are summed: in "pairs" (AVX512-BF16), in "tiles" (AMX), or one by one ("").
    Results of different variants differ in their bits.
    """

    level: str
    path: Path
    functions: dict[tuple[str, torch.dtype], Function]
    variant: str = ""

    @property
    def fused(self) -> bool:
        """Whether the library uses fused multiply-add. All such libraries of one variant give the same bits."""
        return self.level != "baseline" or platform.machine() not in ("x86_64", "AMD64")


def level_of_cpu() -> str:
    """Return the best level that this CPU supports and that torch may use (`ATEN_CPU_CAPABILITY`)."""
    level = LEVEL_OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    return level if level in LEVELS else "baseline"


def variants_of_cpu() -> list[str]:
    """Return the variants that this CPU supports, the best one first."""
    try:
        cpu_words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return []
    return [
        name
        for name, flags in VARIANT_CPU_FLAGS.items()
        if flags <= cpu_words and name in VARIANTS.get(level_of_cpu(), {})
    ]


@cache
def library() -> Library | None:
    """Return the library for this CPU. If it was not compiled at installation, compile it into the user's cache folder.

    If compiling or loading fails, log a warning and return None. The caller then uses `TorchKernels`.
    """
    level, variants = level_of_cpu(), variants_of_cpu()
    try:
        loaded = load_library(level, _library_path(level), *variants)
    except (BuildError, OSError) as error:
        logger.warning("no C kernels, torch serves in their place: %s", error)
        return None
    if variants and loaded.variant != variants[0]:
        logger.warning(
            "this CPU multiplies bfloat16 in %s, which the kernels in C do not: the compiler that made %s is too old "
            "(install gcc 11 or newer and remove that file), or the system refuses this process the registers",
            variants[0],
            loaded.path,
        )
    return loaded


def _library_path(level: str) -> Path:
    if (installed := COMPILED / library_name(level)).exists():
        return installed
    try:
        return compile_level(level, cache_folder() / "kernels")
    except ConfigError as error:
        raise BuildError(str(error)) from None


def load_library(level: str, path: Path, *variants: str) -> Library:
    """Load the library at `path`, with the first of `variants` that it contains and that this process may use; if
    there is none, without a variant.
    """
    shared_library = CDLL(str(path))
    _share_threads(shared_library)
    variant = next((name for name in variants if _has_usable_variant(shared_library, name)), "")
    functions: dict[tuple[str, torch.dtype], Function] = {}
    joiner = joiner_of(shared_library)
    for name, signature in SIGNATURES.items():
        for dtype, kind in KIND_NAMES.items():
            has_variant = variant and kind == "bf16" and name in VARIANTS[level][variant][0]
            function = getattr(shared_library, f"aerie_{name}_{kind}{f'_{variant}' if has_variant else ''}")
            function.argtypes, function.restype = [ARGUMENT_TYPES[code] for code in signature], None
            function.joins = joiner
            functions[name, dtype] = function
    return Library(level, path, functions, variant)


def _has_usable_variant(shared_library: CDLL, variant: str) -> bool:
    """Return whether the library contains `variant` and this process may use it. A process must ask Linux for AMX."""
    return hasattr(shared_library, f"aerie_product_bf16_{variant}") and (
        variant != "tiles" or bool(shared_library.aerie_ask_for_tiles())
    )


def _share_threads(shared_library: CDLL) -> None:
    """Let the kernels use the threads of torch's OpenMP runtime. If that runtime is not GNU's, kernels run on the
    calling thread only.
    """
    process = ctypes.CDLL(None)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    try:
        runtime_functions = [ctypes.cast(getattr(process, name), c_void_p) for name in names]
    except AttributeError:
        return
    shared_library.aerie_runtime.argtypes, shared_library.aerie_runtime.restype = [c_void_p] * 3, None
    shared_library.aerie_runtime(*runtime_functions)
