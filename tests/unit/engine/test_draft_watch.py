"""Warnings about a draft that is rarely accepted, and about a draft checkpoint with suspicious contents."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.arch.draft.token_map import vocabulary_map_doubts
from cluster.cli import main
from cluster.engine import build_engine
from cluster.engine.draft_watch import MIN_TREES, DraftWatch
from cluster.request import LogitAdjustments, Request, RequestParams
from tests.parity.harness import config_of, run
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models import draft_folders as write
from tests.unit.models.checkpoints import copy_of


@pytest.mark.parametrize("every", [0, 25])
def test_draft_watch_warns_once_about_a_rarely_accepted_draft(every: int, caplog: pytest.LogCaptureFixture) -> None:
    """The draft is accepted in no tree (`every` is 0), or in every 25th tree."""
    watch = DraftWatch(3, ("its map is odd",))
    for tree in range(2 * MIN_TREES):
        assert watch.rejected == (tree >= MIN_TREES)
        watch.count_tree(int(every > 0 and tree % every == 0))
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith(
        f"rank 3: the draft was accepted in {MIN_TREES // every if every else 0} of {MIN_TREES} trees"
    )
    assert "Noted when it was read: its map is odd." in text and "probe-draft" in text
    for _ in range(MIN_TREES):
        watch.count_tree(1)
    assert not watch.rejected


def test_draft_watch_does_not_warn_about_an_accepted_draft(caplog: pytest.LogCaptureFixture) -> None:
    watch = DraftWatch(0)
    for tree in range(2 * MIN_TREES):
        watch.count_tree(int(tree % 10 == 0))
    assert not watch.rejected and not caplog.records


def test_engine_status_reports_a_rarely_accepted_draft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft proposes only two ids. Requests "a" and "b" ban these ids; request "c" allows no others."""
    monkeypatch.setattr("cluster.engine.draft_watch.MIN_TREES", 30)
    target = target_folder()
    draft = draft_folder(target, own_head=False)
    (tmp_path / "ids.json").write_text("[3, 7]")
    engine = build_engine(config_of(target, draft, speculative_token_map=str(tmp_path / "ids.json")))
    banned = LogitAdjustments(bias=((3, -100.0), (7, -100.0)))
    params = RequestParams(max_tokens=30, ignore_eos=True, adjustments=banned, seed=1)
    assert not engine.status().draft_rejected
    run(engine, [Request("a", (1, 2, 3), params)])
    assert not engine.status().draft_rejected, "the first token has no tree, so one tree is missing"
    run(engine, [Request("b", (1, 2, 3), params)])
    assert engine.status().draft_rejected and engine.status().accept_length == 1.0
    assert caplog.text.count("the draft was accepted in 0 of 30 trees") == 1
    allowed = replace(params, adjustments=LogitAdjustments(allowed_token_ids=(3, 7)))
    run(engine, [Request("c", (1, 2, 3), allowed)])
    assert not engine.status().draft_rejected


def zero_map(folder: Path, without_t2d: bool) -> str:
    """Write a draft with 40 of the target's ids whose map `d2t` holds only zeros; return its folder."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.zeros_like(tensors["d2t"])
        tensors["t2d"] = torch.arange(len(tensors["t2d"])) < 40
        if without_t2d:
            del tensors["t2d"]

    return copy_of(draft_folder(target_folder(), draft_vocab=40), folder, change)


def test_vocabulary_map_of_zeros_gives_a_warning_at_load_and_in_inspect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = target_folder(), zero_map(tmp_path / "zeros", without_t2d=True)
    caplog.set_level(logging.WARNING)
    info = build_engine(config_of(target, draft)).info().draft
    assert info is not None and "d2t holds only zeros" in info.doubts[0] and "first 40 ids of 64" in info.doubts[0]
    assert f"draft {draft}: {info.doubts[0]}" in caplog.text
    assert main(["inspect", target, "--draft", draft]) == 0
    assert f"  doubt: {info.doubts[0]}" in capsys.readouterr().out
    caplog.clear()
    intended = build_engine(config_of(target, zero_map(tmp_path / "meant", without_t2d=False))).info().draft
    assert intended is not None and not intended.doubts and "d2t" not in caplog.text, "t2d agrees, so it is intended"


def test_vocabulary_map_doubts_skips_files_without_tensor_data(tmp_path: Path) -> None:
    """An outline of a remote file has its header and its size, and a hole in place of the tensors."""
    file, shapes = tmp_path / "model.safetensors", {"d2t": (4096,)}
    save_file({"d2t": torch.zeros(4096, dtype=torch.int64)}, file)
    assert len(vocabulary_map_doubts(str(tmp_path), shapes, 4096, 8192)) == 1
    content = file.read_bytes()
    file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    os.truncate(file, len(content))
    assert vocabulary_map_doubts(str(tmp_path), shapes, 4096, 8192) == []


@pytest.mark.parametrize(
    ("make_draft", "expected_window", "expected_doubt"),
    [
        (lambda: draft_folder(target_folder()), 5, "every layer sees so many tokens; set it to null"),
        (write.eagle1, None, "it is served with full attention"),
    ],
    ids=["eagle3", "eagle1"],
)
def test_inspect_doubts_a_sliding_window_on_a_llama_draft(
    make_draft: Callable[[], str],
    expected_window: int | None,
    expected_doubt: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_of(make_draft(), tmp_path / "draft", model_type="llama", sliding_window=5)
    assert main(["inspect", target_folder(), "--draft", folder, "--json"]) == 0
    draft_report = json.loads(capsys.readouterr().out)["draft"]
    assert draft_report["choices"]["sliding_window"]["value"] == expected_window
    assert "type llama does not define" in draft_report["choices"]["sliding_window"]["source"]
    assert len(draft_report["doubts"]) == 1 and expected_doubt in draft_report["doubts"][0]
