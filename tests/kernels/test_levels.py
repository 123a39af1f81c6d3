"""Tests of the C kernels with every level of vector instructions that this CPU supports.

All levels with fused multiply-add give the same bits. The sanitizers of addresses and of undefined behaviour report no
error.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cluster.kernels.library
from cluster.kernels.build import COMPILED, LEVELS, VARIANTS, compile_level, compiler, library_name
from cluster.kernels.library import level_of_cpu, load_library, variants_of_cpu
from cluster.kernels.library import library as library_of_cpu
from tests.kernels.calls import results

ORDER = ("baseline", "avx2", "avx512")
OF_VARIANTS = re.compile(r"(product|stack|codes .*) torch.bfloat16")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


def runnable_levels() -> list[str]:
    """Return the levels that this CPU can run, the lowest first."""
    cpu_level = level_of_cpu()
    return [level for level in ORDER[: ORDER.index(cpu_level) + 1] if level in LEVELS]


def library_of(level: str, folder: Path) -> Path:
    """Return the installed library of a level if it was compiled from the current sources. Otherwise compile one."""
    installed = COMPILED / library_name(level)
    return installed if installed.exists() else compile_level(level, folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_instruction_levels_give_equal_kernel_results(tmp_path: Path) -> None:
    """Levels with fused multiply-add give the same bits. Two cases are compared with a tolerance: the baseline level,
    which has no fused multiply-add, and the variants that multiply bfloat16 in pairs or tiles.
    """
    levels = runnable_levels()
    if len(levels) < 2:
        pytest.skip(f"this CPU runs only the levels {levels}")
    *lower_results, top_results = (dict(results(load_library(level, library_of(level, tmp_path)))) for level in levels)
    for variant in variants_of_cpu():
        library = load_library(levels[-1], library_of(levels[-1], tmp_path), variant)
        assert library.variant == variant
        variant_results = dict(results(library))
        different = {
            name
            for name, out in variant_results.items()
            if not torch.equal(raw_bytes(out), raw_bytes(top_results[name]))
        }
        assert different and all(OF_VARIANTS.match(name) for name in different)
        assert {name for name in different if not is_close(name, variant_results[name], top_results[name])} == set()
    for level, level_results in zip(levels, lower_results, strict=False):
        assert list(level_results) == list(top_results) and len(level_results) > 1000
        if level == "baseline":
            wrong = {name for name, out in level_results.items() if not is_close(name, out, top_results[name])}
        else:
            wrong = {
                name
                for name, out in level_results.items()
                if not torch.equal(raw_bytes(out), raw_bytes(top_results[name]))
            }
        assert wrong == set(), level


def is_close(name: str, out: Tensor, expected: Tensor) -> bool:
    """Return whether two results are equal within the tolerance of their dtype.

    Results of the sampler must have the same bits, because noise is the same function at every level. Results of
    operators must too, because operators only copy, compare and count.
    """
    if name.startswith(("choice", "operators")):
        return torch.equal(out, expected)
    limit = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.05}[out.dtype]
    scale = max(1.0, expected.abs().max().item()) if out.numel() else 1.0
    return torch.allclose(out, expected, rtol=0, atol=limit * scale, equal_nan=True)


def raw_bytes(out: Tensor) -> Tensor:
    """Return the bytes of a tensor. Compared as bytes, a NaN equals itself."""
    return out.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def sanitized_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that compiles a level with sanitizers, once for all variants of the level."""
    return cache(lambda level: compile_level(level, tmp_path_factory.mktemp("sanitized"), SANITIZERS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("level", "variant"), [(level, variant) for level in ORDER for variant in ("", *VARIANTS.get(level, ()))]
)
def test_sanitizers_report_no_error_in_the_kernels(
    level: str, variant: str, sanitized_library: Callable[[str], Path]
) -> None:
    if level not in runnable_levels() or (variant and variant not in variants_of_cpu()):
        pytest.skip("this CPU does not run it")
    library = sanitized_library(level)
    cc = compiler()
    assert cc is not None
    sanitizer_libraries = [
        subprocess.run([cc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(sanitizer_libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-m", "tests.kernels.calls", level, str(library), *[variant] * bool(variant)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(result.stdout.splitlines()) > 100


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in LEVELS, reason="only x86-64 has the level avx512 and its variants")
def test_compiler_without_a_variant_builds_the_library_without_that_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old assembler does not know AMX instructions. The library is then built without the variant `tiles`."""
    old_compiler = tmp_path / "old"
    refuse_tiles = 'case "$*" in *-DTILES*) echo no such instruction >&2; exit 1;; esac'
    old_compiler.write_text(f'#!/bin/sh\n{refuse_tiles}\nexec {compiler()} "$@"\n')
    old_compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(old_compiler))
    library = load_library("avx512", compile_level("avx512", tmp_path / "made", ("-O0",)), "tiles", "pairs")
    assert library.variant == "pairs"
    assert library.functions["product", torch.bfloat16].__name__ == "aerie_product_bf16_pairs"


def test_concurrent_ranks_compile_the_kernel_library_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake compiler writes empty files and logs each call."""
    call_log, fake_compiler = tmp_path / "calls", tmp_path / "cc"
    log_last_argument = 'for last; do :; done\necho "$last" >> '
    fake_compiler.write_text(
        f'#!/bin/sh\n{log_last_argument}{call_log}\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.01\ntouch "$2"\n'
    )
    fake_compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(fake_compiler))
    with ThreadPoolExecutor(4) as ranks:
        libraries = {
            rank.result() for rank in [ranks.submit(compile_level, "baseline", tmp_path / "made") for _ in range(4)]
        }
    assert [path.exists() for path in libraries] == [True]
    objects = [line for line in call_log.read_text().splitlines() if line.endswith(".o")]
    assert objects and len({Path(path).name for path in objects}) == len(objects)


def test_cpu_variant_missing_in_the_library_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the log message, nobody would know why a rank computes slightly different numbers than other ranks."""
    monkeypatch.setattr(cluster.kernels.library, "variants_of_cpu", lambda: ["threes"])
    assert library_of_cpu.__wrapped__() is not None
    assert "this CPU multiplies bfloat16 in threes, which the kernels in C do not" in caplog.text
