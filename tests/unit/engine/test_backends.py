"""Which kernels `select_kernels` selects and how it describes them, and the build of the C kernels."""

import ctypes
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cluster.engine.backends
import cluster.kernels.build
import cluster.kernels.library
from cluster.config import ConfigError
from cluster.engine.backends import select_kernels
from cluster.kernels.build import BuildError, compile_level, compiler, digest, library_name
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.library import level_of_cpu, library
from tests.unit.kernels.library import c_library

CPU = torch.device("cpu")


def test_select_kernels_prefers_c_on_cpu() -> None:
    level = c_library().level
    chosen = select_kernels("auto", CPU, torch.float32)
    assert (chosen.name, chosen.description) == ("c", f"C, compiled for {level}")
    assert select_kernels("torch", CPU, torch.float32).description == "torch"


def test_c_kernel_numerics_depend_on_the_bfloat16_variant_in_bfloat16_only() -> None:
    """So a gang whose ranks have different variants is refused in bfloat16, and in no other dtype."""
    libraries = [replace(c_library(), variant=variant) for variant in ("", "pairs", "tiles")]
    for dtype, differ in ((torch.float32, False), (torch.float64, False), (torch.bfloat16, True)):
        kernels = [CKernels(library, dtype) for library in libraries]
        assert (
            len({kernel.numerics for kernel in kernels})
            == len({kernel.description for kernel in kernels})
            == (3 if differ else 1)
        )


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [(CPU, torch.float16, "and dtype is float16"), (torch.device("meta"), torch.float32, "and device is meta")],
)
def test_select_kernels_names_why_c_kernels_cannot_be_used(
    device: torch.device, dtype: torch.dtype, reason: str
) -> None:
    chosen = select_kernels("auto", device, dtype)
    assert chosen.name == "torch" and chosen.description.endswith(reason)
    with pytest.raises(ConfigError, match=f"attention_backend c .*{reason}; set"):
        select_kernels("c", device, dtype)


def test_select_kernels_falls_back_to_torch_without_a_c_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster.kernels.library, "COMPILED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(cluster.engine.backends, "library", library.__wrapped__)
    assert compiler() is None
    assert select_kernels("auto", CPU, torch.float32).description == "torch; C is not compiled here"
    assert "there is no C compiler; install gcc or clang, or set CC" in caplog.text
    with pytest.raises(ConfigError, match="attention_backend c is not compiled here; install gcc or clang"):
        select_kernels("c", CPU, torch.float32)


def test_build_error_contains_the_compiler_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing_compiler = tmp_path / "cc"
    failing_compiler.write_text("#!/bin/sh\necho 'the disk is full' >&2\nexit 3\n")
    failing_compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(failing_compiler))
    with pytest.raises(BuildError, match=r"ended with 3:\nthe disk is full"):
        compile_level(level_of_cpu(), tmp_path / "to")
    assert not list((tmp_path / "to").iterdir())


def test_build_error_names_compiler_timeout_and_missing_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow_compiler = tmp_path / "cc"
    slow_compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    slow_compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(slow_compiler))
    monkeypatch.setattr(cluster.kernels.build, "TIMEOUT_S", 0.05)
    with pytest.raises(BuildError, match=r"took over 0\.05 s"):
        compile_level(level_of_cpu(), tmp_path / "to")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def raise_unknown_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", raise_unknown_home)
    monkeypatch.setattr(cluster.kernels.library, "COMPILED", tmp_path / "none")
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"there is no home folder, .*; set XDG_CACHE_HOME"):
        cluster.kernels.library._library_path(level_of_cpu())


def test_compile_removes_work_folders_left_by_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover_folder = tmp_path / f"{cluster.kernels.build.WORK_FOLDER_PREFIX}x"
    leftover_folder.mkdir()
    (leftover_folder / "half.o").touch()
    (tmp_path / "aerie-other.so").touch()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(BuildError):
        compile_level(level_of_cpu(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["aerie-other.so"]


def test_library_name_contains_a_digest_of_level_and_flags() -> None:
    level = level_of_cpu()
    assert digest(level) in library_name(level)
    assert digest(level) != digest(level, ("-O1",))


def test_process_openmp_runtime_uses_the_thread_count_of_torch() -> None:
    """The process must compute with the OpenMP runtime that torch loaded: it reports the thread count set in torch."""
    c_library()
    process_library, original_threads = ctypes.CDLL(None), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert process_library.omp_get_max_threads() == 3
    finally:
        torch.set_num_threads(original_threads)
