"""The C kernels at every level of vector instructions that this CPU has: the same bits wherever products are fused, and
nothing that the sanitizers of addresses and of undefined behaviour object to.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.kernels.build import LEVELS, compile_level, compiler
from cluster.kernels.library import level_of_cpu, opened
from tests.kernels.calls import digests, results

ORDER = ("baseline", "avx2", "avx512")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


def runnable() -> list[str]:
    here = level_of_cpu()
    return [level for level in ORDER[: ORDER.index(here) + 1] if level in LEVELS]


@pytest.mark.timeout(600)
def test_all_levels_with_fused_products_give_the_same_bits(tmp_path: Path) -> None:
    levels = [level for level in runnable() if level != "baseline"]
    if len(levels) < 2:
        pytest.skip(f"this CPU runs {levels} with fused products")
    first, *others = (digests(opened(level, compile_level(level, tmp_path))) for level in levels)
    for other in others:
        assert {name for name in first if first[name] != other[name]} == set()


@pytest.mark.timeout(600)
def test_the_baseline_gives_the_same_numbers(tmp_path: Path) -> None:
    here = dict(results(opened("here", compile_level(level_of_cpu(), tmp_path))))
    for name, out in results(opened("baseline", compile_level("baseline", tmp_path))):
        limit = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.05}[out.dtype]
        scale = max(1.0, here[name].abs().max().item()) if out.numel() else 1.0
        assert torch.allclose(out, here[name], rtol=0, atol=limit * scale, equal_nan=True), name
        if name.startswith("choice"):
            assert torch.equal(out, here[name]), f"{name}: noise is one function at all levels"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", ORDER)
def test_sanitizers_object_to_nothing(level: str, tmp_path: Path) -> None:
    if level not in runnable():
        pytest.skip("this CPU does not run it")
    library = compile_level(level, tmp_path, SANITIZERS)
    cc = compiler()
    assert cc is not None
    found = [
        subprocess.run([cc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.kernels.calls", str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) > 100
