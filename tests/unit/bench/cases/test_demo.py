import io

import pytest

from cluster.bench.cases.demo import PROMPTS, ServerFigures, compare
from cluster.bench.live import LiveView
from cluster.bench.report import json_line
from cluster.bench.streams import ClientStream, Prompt


def stream(prompt: Prompt, tokens: list[int], started: float, ended: float, steps: int = 0) -> ClientStream:
    client_stream = ClientStream(prompt, "some\ntext", list(tokens), started, started + 0.5, ended, "length")
    client_stream.steps, client_stream.accepted_tokens = steps, max(0, len(tokens) - 1 - steps) if steps else 0
    return client_stream


def server_figures(seconds: float, steps: int = 0, one_token_differs: bool = False) -> ServerFigures:
    batch_rounds = [
        [
            stream(p, [at, 1, 2, 3, 9 if one_token_differs and at == 2 else 4], 10.0, 10.0 + seconds, steps)
            for at, p in enumerate(PROMPTS)
        ]
        for _ in range(2)
    ]
    return ServerFigures(3.0, batch_rounds, [[stream(PROMPTS[0], [0, 1, 2, 3, 4], 20.0, 20.0 + seconds / 4, steps)]])


def test_compare_computes_speedup_accept_length_and_latency_of_two_servers() -> None:
    result = compare(server_figures(2.0, steps=2), server_figures(5.0))
    assert (result["failed"], result["identical"], result["differences"]) == (0, True, [])
    assert result["accept_length"] == pytest.approx(2.0)  # four tokens after the first, in two steps
    assert result["tokens_per_second"] == pytest.approx(8 * 5 / 2.0)
    assert result["speedup"] == pytest.approx(2.5)
    assert result["tokens_per_second_one_stream"] == pytest.approx(10.0)
    assert result["first_token_ms"] == pytest.approx(500.0)
    line = json_line(result)
    assert "\n" not in line
    for key in ("failed", "identical", "accept_length", "speedup"):
        assert f'"{key}"' in line


def test_compare_reports_side_prompt_and_position_of_different_tokens() -> None:
    result = compare(server_figures(2.0, steps=2, one_token_differs=True), server_figures(5.0))
    assert result["identical"] is False
    assert result["differences"] == [{"side": "speculation", "prompt": 2, "position": 4}]


def test_compare_counts_a_failed_stream() -> None:
    figures_with_failure = server_figures(5.0)
    figures_with_failure.batch_rounds[1][3].error = "status 503"
    figures_with_failure.batch_rounds[1][3].token_ids = [3]
    result = compare(server_figures(2.0, steps=2), figures_with_failure)
    assert (result["failed"], result["identical"]) == (1, False)


def test_live_view_prints_one_plain_line_without_a_terminal() -> None:
    out = io.StringIO()
    view = LiveView("round 1", 5, out)
    streams = server_figures(2.0, steps=2).batch_rounds[0]
    view(streams)
    view(streams)
    assert out.getvalue() == "round 1: 8 of 8 streams done, 40 tokens, 20.0 tokens/s, accept length 2.00\n"


def test_live_view_redraws_a_terminal_in_place() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    view = LiveView("round 1", 5, out)
    view(server_figures(2.0, steps=2).batch_rounds[0])
    first = out.getvalue()
    view(server_figures(2.0, steps=2).batch_rounds[0])
    assert first.count("\n") == len(PROMPTS) + 2
    assert out.getvalue()[len(first) :].startswith(f"\x1b[{len(PROMPTS) + 2}A")
    assert "\\n" in first, "a line end inside a text is shown as \\n"
