"""The table of faults fits the source. `make planted` shows that the tests find each fault."""

import ast
from pathlib import Path

import pytest

from tests.planted.checkout import OWN_FOLDER, ROOT, Copy, files, tree_digest
from tests.planted.fault import Fault, StaleFaultError, all_faults
from tests.planted.results import Result, Results, table

FAULTS = all_faults()
FAULT = Fault("one", "a.py", "x = 1", "x = 2", "nothing", ("tests/unit",))


def test_planted_fault_table_is_large_enough() -> None:
    """The table has 95 faults in files of at least five, so it is too small as soon as one file is not read."""
    assert len(FAULTS) > 90


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_applies_to_its_source_file(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    planted = fault.plant(source)
    assert planted != source
    if fault.file.endswith(".py"):
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source)), "the fault changes only comments or layout"
    assert fault.effect.endswith(".") and fault.tests
    assert [test for test in fault.tests if not (ROOT / test).exists() or test.startswith(OWN_FOLDER)] == []


@pytest.mark.parametrize("source", ["y = 1", "x = 1\nx = 1"])
def test_fault_whose_old_text_is_not_unique_raises(source: str) -> None:
    with pytest.raises(StaleFaultError, match=r"'one': its old text occurs [02] times in a\.py"):
        FAULT.plant(source)


def test_duplicate_fault_names_are_refused(tmp_path: Path) -> None:
    entry = '[[fault]]\nname = "a"\nfile = "f"\nold = "o"\nnew = "n"\neffect = "e"\ntests = ["t"]\n'
    (tmp_path / "one.toml").write_text(entry)
    assert [fault.name for fault in all_faults(tmp_path)] == ["a"]
    (tmp_path / "two.toml").write_text(entry)
    with pytest.raises(ValueError, match="same name"):
        all_faults(tmp_path)


def test_copy_contains_the_fault_only_inside_the_planted_context(tmp_path: Path) -> None:
    fault = FAULTS[0]
    copy = Copy(tmp_path / "copy", [fault.file])
    path, original_text = tmp_path / "copy" / fault.file, (ROOT / fault.file).read_text(encoding="utf-8")
    stale_bytecode = path.parent / "__pycache__" / f"{path.stem}.cpython-311.pyc"
    stale_bytecode.parent.mkdir()
    stale_bytecode.write_bytes(b"")
    with pytest.raises(ZeroDivisionError), copy.planted(fault):
        assert path.read_text(encoding="utf-8") == fault.plant(original_text)
        assert not stale_bytecode.exists()
        raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == original_text


def test_tree_digest_depends_on_product_files_and_selected_tests() -> None:
    names = files()
    assert "cluster/config/engine_config.py" in names
    digest = tree_digest(names, ("tests/unit/kv",))
    assert digest == tree_digest([*names, "README.md", "tests/planted/fault.py"], ("tests/unit/kv",))
    assert digest == tree_digest([name for name in names if name != "tests/unit/test_cli.py"], ("tests/unit/kv",))
    for needed in ("cluster/config/engine_config.py", "tests/unit/kv/test_radix.py", "tests/support/page_tables.py"):
        assert digest != tree_digest([name for name in names if name != needed], ("tests/unit/kv",))


def test_planted_results_persist_between_runs(tmp_path: Path) -> None:
    path = tmp_path / "some" / "results.jsonl"
    first = Result("one", FAULT.digest, "tree", "found", "tests/a.py::b", 1.5)
    Results(path).add(first)
    Results(path).add(Result("one", FAULT.digest, "tree", "found", "tests/a.py::b", 1.5, proved=True))
    found = Results(path).of(FAULT.digest, "tree")
    assert found is not None and found.proved and found.test == "tests/a.py::b"
    assert Results(path).of(FAULT.digest, "another tree") is None
    assert table([first]).splitlines()[1].split() == ["one", "found", "2", "tests/a.py::b"]
