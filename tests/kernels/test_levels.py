"""The C kernels at every level of vector instructions that this CPU has: the same bits wherever products are fused, and
nothing that the sanitizers of addresses and of undefined behaviour object to.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def runnable() -> list[str]:
    here = level_of_cpu()
    return [level for level in ORDER[: ORDER.index(here) + 1] if level in LEVELS]


def library_of(level: str, folder: Path) -> Path:
    """What the installation compiled if it is of these sources, else compiled now."""
    installed = COMPILED / library_name(level)
    return installed if installed.exists() else compile_level(level, folder)


@pytest.mark.timeout(600)
def test_instruction_levels_give_equal_kernel_results(tmp_path: Path) -> None:
    """To the bit where products are fused; the baseline, which has no fused products, and products of bfloat16 in pairs
    or tiles as closely as numbers allow.
    """
    levels = runnable()
    if len(levels) < 2:
        pytest.skip(f"this CPU runs {levels} alone")
    *others, here = (dict(results(load_library(level, library_of(level, tmp_path)))) for level in levels)
    for variant in variants_of_cpu():
        library = load_library(levels[-1], library_of(levels[-1], tmp_path), variant)
        assert library.variant == variant
        own = dict(results(library))
        apart = {name for name, out in own.items() if not torch.equal(bits(out), bits(here[name]))}
        assert apart and all(OF_VARIANTS.match(name) for name in apart)
        assert {name for name in apart if not near(name, own[name], here[name])} == set()
    for level, found in zip(levels, others, strict=False):
        assert list(found) == list(here) and len(found) > 1000
        if level == "baseline":
            wrong = {name for name, out in found.items() if not near(name, out, here[name])}
        else:
            wrong = {name for name, out in found.items() if not torch.equal(bits(out), bits(here[name]))}
        assert wrong == set(), level


def near(name: str, out: Tensor, here: Tensor) -> bool:
    """Whether two results are the same numbers. What the chooser finds has the same bits, as noise is one function, and
    so has what is copied, compared or counted.
    """
    if name.startswith(("choice", "operators")):
        return torch.equal(out, here)
    limit = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.05}[out.dtype]
    scale = max(1.0, here.abs().max().item()) if out.numel() else 1.0
    return torch.allclose(out, here, rtol=0, atol=limit * scale, equal_nan=True)


def bits(out: Tensor) -> Tensor:
    """So that a NaN equals itself."""
    return out.contiguous().view(torch.uint8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("level", "variant"), [(level, variant) for level in ORDER for variant in ("", *VARIANTS.get(level, ()))]
)
def test_sanitizers_report_no_error_in_the_kernels(level: str, variant: str, tmp_path: Path) -> None:
    if level not in runnable() or (variant and variant not in variants_of_cpu()):
        pytest.skip("this CPU does not run it")
    library = compile_level(level, tmp_path, SANITIZERS)
    cc = compiler()
    assert cc is not None
    found = [
        subprocess.run([cc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.kernels.calls", level, str(library), *[variant] * bool(variant)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) > 100


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in LEVELS, reason="its variants are of x86-64")
def test_compiler_without_a_variant_builds_the_library_without_that_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old assemblers know no AMX; everything else serves."""
    old = tmp_path / "old"
    refused = 'case "$*" in *-DTILES*) echo no such instruction >&2; exit 1;; esac'
    old.write_text(f'#!/bin/sh\n{refused}\nexec {compiler()} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    library = load_library("avx512", compile_level("avx512", tmp_path / "made", ("-O0",)), "tiles", "pairs")
    assert library.variant == "pairs"
    assert library.functions["product", torch.bfloat16].__name__ == "aerie_product_bf16_pairs"


def test_concurrent_ranks_compile_the_kernel_library_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that makes nothing, and says how often it was asked."""
    asked, compiling = tmp_path / "asked", tmp_path / "cc"
    last = 'for last; do :; done\necho "$last" >> '
    compiling.write_text(f'#!/bin/sh\n{last}{asked}\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.01\ntouch "$2"\n')
    compiling.chmod(0o755)
    monkeypatch.setenv("CC", str(compiling))
    with ThreadPoolExecutor(4) as ranks:
        made = {
            rank.result() for rank in [ranks.submit(compile_level, "baseline", tmp_path / "made") for _ in range(4)]
        }
    assert [path.exists() for path in made] == [True]
    objects = [line for line in asked.read_text().splitlines() if line.endswith(".o")]
    assert objects and len({Path(each).name for each in objects}) == len(objects)


def test_cpu_variant_missing_in_the_library_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a rank would compute other digits than its like, and nobody knew why."""
    monkeypatch.setattr(cluster.kernels.library, "variants_of_cpu", lambda: ["threes"])
    assert library_of_cpu.__wrapped__() is not None
    assert "this CPU multiplies bfloat16 in threes, which the kernels in C do not" in caplog.text
