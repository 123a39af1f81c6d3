import argparse
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.__main__  # noqa: F401 - the import adds parts to command.PARTS
from cluster.bench import command
from cluster.bench.cases import acceptance, adaptive, levels, offline, overload, peers, serving
from cluster.bench.goals import Goal


def parse_arguments(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def serving_result() -> dict[str, object]:
    memory = {"processes": 3, "resident_mib": 900.0, "proportional_mib": 600.0}
    return {
        "what": "serving", "starts": 3, "ready_seconds": 9.0, "first_answer_seconds": 9.5, "streams_at_once": 8,
        "new_tokens": 32, "rounds": 15, "tokens_per_second": 500.0, "first_token_ms": 40.0, "accept_length": 2.5,
        "failed": 0, "identical": True, "memory_idle": memory, "memory_loaded": memory,
        "memory_by_process_mib": {"raylet": 20.0},
    }  # fmt: skip


def test_bench_parts_run_in_order_and_write_result_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        offline, "measure", lambda pair, size, log_progress: {"what": "offline", "repeats": size.repeats}
    )
    monkeypatch.setattr(offline, "show", lambda result: "the table")
    monkeypatch.setattr(offline, "goals", lambda result: [Goal("speed", 2.0, 1.6, at_least=True)])
    monkeypatch.setattr(serving, "measure", lambda pair, size, log_progress: serving_result())
    assert command.run(parse_arguments("--repeats", "7", "--json", "--out", str(tmp_path))) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["what"] for line in lines] == ["offline", "serving"]
    assert lines[0]["repeats"] == 7
    assert json.loads((tmp_path / "serving.json").read_text())["first_answer_seconds"] == 9.5
    assert (tmp_path / "offline.txt").read_text() == "the table\ngoals: 1 of 1 met\n"
    assert command.run(parse_arguments("serving")) == 0
    assert "under 25" in capsys.readouterr().out


def test_options_choose_a_part_of_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[adaptive.Size] = []
    monkeypatch.setattr(adaptive, "measure", lambda pair, size, log_progress: sizes.append(size) or {})
    monkeypatch.setattr(adaptive, "show", lambda result: "")
    monkeypatch.setattr(adaptive, "goals", lambda result: [])
    options = "--families", "chains", "--kinds", "code", "copy", "--temperatures", "0", "--batches", "1", "8"
    assert command.run(parse_arguments("adaptive", *options)) == 0
    assert sizes == [adaptive.Size(families=("chains",), kinds=("code", "copy"), temperatures=(0.0,), batches=(1, 8))]
    with pytest.raises(ValueError, match="--kinds is an option of adaptive, which the parts leave out"):
        command.run(parse_arguments("offline", "--kinds", "code"))


def test_bench_reports_different_outputs_and_failures_and_exits_with_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(levels, "measure", lambda pair, size, log_progress: {"identical": False})
    monkeypatch.setattr(levels, "show", lambda result: "")
    assert command.run(parse_arguments("levels")) == command.EXIT_FAILED
    assert "DIFFERENT" in capsys.readouterr().out
    monkeypatch.setattr(levels, "measure", lambda pair, size, log_progress: {"failed": 2})
    assert command.run(parse_arguments("levels")) == command.EXIT_FAILED
    assert "FAILED: 2" in capsys.readouterr().out


def test_missed_goal_is_printed_and_sets_the_failure_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overload, "measure", lambda size, log_progress: {})
    monkeypatch.setattr(overload, "show", lambda result: "the table")
    goals = [Goal("refusal, s", 30.0, 20.0), Goal("texts", 3, 3, at_least=True, slack=1)]
    monkeypatch.setattr(overload, "goals", lambda result: goals)
    assert command.run(parse_arguments("overload")) == command.EXIT_FAILED
    assert capsys.readouterr().out.splitlines()[:3] == [
        "the table",
        "goals: 1 of 2 met",
        "MISSED refusal, s: 30, goal at most 20",
    ]
    assert command.run(parse_arguments("overload", "--quick", "--json")) == 0
    reported_goals = json.loads(capsys.readouterr().out)["goals"]
    assert reported_goals[0] == {"what": "refusal, s", "value": 30.0, "at_most": 80.0, "met": True}
    assert reported_goals[1] == {"what": "texts", "value": 3, "at_least": 3, "met": True}
    goals[1] = Goal("texts", 2, 3, at_least=True, slack=1)
    assert command.run(parse_arguments("overload", "--quick")) == command.EXIT_FAILED
    assert "MISSED texts: 2, goal at least 3" in capsys.readouterr().out


def test_demo_pair_goals_do_not_apply_to_another_model_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(acceptance, "measure", lambda pair, size, log_progress: {})
    monkeypatch.setattr(acceptance, "show", lambda result: "")
    monkeypatch.setattr(acceptance, "goals", lambda result: [Goal("accept length", 1.0, 2.8, at_least=True)])
    assert command.run(parse_arguments("acceptance")) == command.EXIT_FAILED
    assert command.run(parse_arguments("acceptance", "--model", str(tmp_path), "--draft", str(tmp_path))) == 0


def test_bench_help_lists_the_duration_of_each_part() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    help_text = " ".join(parser.format_help().split())
    for part, bench_part in command.PARTS.items():
        assert f"{part} ({bench_part.minutes:g} min, quick {bench_part.quick_s:g} s)" in help_text


@pytest.mark.parametrize("part", command.PARTS)
def test_bench_part_receives_its_quick_size_and_progress_callback(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, received_arguments = command.PARTS[part].module, dict[str, Any]()
    measure_signature = inspect.signature(module.measure)

    def measure(*positional: Any, **keywords: Any) -> dict[str, Any]:
        received_arguments.update(measure_signature.bind(*positional, **keywords).arguments)
        return {}

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "show", lambda result: "")
    monkeypatch.setattr(module, "goals", lambda result: [], raising=False)
    assert command.run(parse_arguments(part, "--quick")) == 0
    assert received_arguments["size"] == module.QUICK and received_arguments["log_progress"] is command._print_progress


def test_peers_part_accepts_a_target_without_draft_and_given_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    received_arguments: list[Any] = []
    monkeypatch.setattr(
        peers, "measure", lambda pair, size, log_progress: received_arguments.extend([pair, size]) or {}
    )
    monkeypatch.setattr(peers, "show", lambda result: "")
    monkeypatch.setattr(peers, "goals", lambda result: [])
    assert command.run(parse_arguments("peers", "--model", "/a/model", "--batches", "1", "8")) == 0
    pair, size = received_arguments
    assert (pair.target, pair.draft, size.batches) == ("/a/model", "", (1, 8))


def test_bench_bad_input_raises_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'onlin'"):
        command.run(parse_arguments("onlin"))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        command.run(parse_arguments("acceptance", "--model", str(tmp_path), "--draft", str(tmp_path)))
    with pytest.raises(ValueError, match="--model needs --draft"):
        command.run(parse_arguments("acceptance", "--model", str(tmp_path)))
