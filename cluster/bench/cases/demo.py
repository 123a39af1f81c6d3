"""`aerie demo`: serve the demo's target and draft, stream eight prompts at once, and show the gain of speculation.

Requests take the same path as a user's: `aerie serve`, HTTP, server-sent events. The server runs twice, with and
without speculation. The demo compares the tokens of both runs, and the medians of their speeds over several rounds.
"""

import argparse
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.bench.live import LiveView, last_line
from cluster.bench.rank_counts import RankCounts, counter_growth, rank_rows, rank_table, read_rank_counts
from cluster.bench.report import first_difference, json_line, median, ratio, records_table, table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import (
    ClientStream,
    Prompt,
    accept_length,
    first_token_ms,
    served_model,
    stream_all,
    total_tokens_per_second,
)

PLAIN = "speculative_algorithm=null"
WARM_UP_TOKENS = 32
NEXT_STEPS = """Where to look: `make serve` (or `aerie serve`) keeps the pair on http://127.0.0.1:8000
  /          a page of what the server does, and a playground that draws the tree of every step
  /docs      the API; also /metrics and /server_info
  aerie chat --url http://127.0.0.1:8000, and aerie status --url the same, are its terminal
"""
NAME_WIDTH = 36
PROMPTS = (
    Prompt("class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"),
    Prompt("import os\nimport sys\n\ndef main():\n    parser = argparse.ArgumentParser(\n"),
    Prompt("    def read(self, size=-1):\n        if self.closed:\n            raise ValueError("),
    Prompt("def __repr__(self):\n    return '<%s at %#x>' % ("),
    Prompt("    def test_simple(self):\n        self.assertEqual("),
    Prompt("for name, value in sorted(self.items()):\n    if not isinstance(", 0.8, 11),
    Prompt("try:\n    from _collections import OrderedDict\nexcept ImportError:\n", 0.8, 12),
    Prompt("def parse(self, source):\n    # Return the list of tokens.\n", 0.8, 13),
)


@dataclass(slots=True)
class ServerFigures:
    """The results of one server. `batch_rounds`: rounds of all prompts at once. `single_rounds`: rounds of only the
    first prompt. `killed_processes`: how many processes outlived the server and were killed. `ranks`: the growth of
    each rank's counters during these rounds.
    """

    startup_s: float = 0.0
    batch_rounds: list[list[ClientStream]] = field(default_factory=list)
    single_rounds: list[list[ClientStream]] = field(default_factory=list)
    killed_processes: int = 0
    ranks: dict[int, RankCounts] = field(default_factory=dict)

    @property
    def streams(self) -> list[ClientStream]:
        """All measured streams."""
        return [stream for streams in (*self.batch_rounds, *self.single_rounds) for stream in streams]

    @property
    def failed(self) -> int:
        """The number of streams that did not end with all their tokens."""
        return sum(stream.error is not None for stream in self.streams)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie demo`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a Serve config (default: the demo pair's)")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as for serve")
    parser.add_argument("--max-tokens", type=int, default=192, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="how often the prompts run on each side")


def run(args: argparse.Namespace) -> int:
    """Serve, stream, compare and report. Return 0 if nothing failed and both servers gave the same tokens, else 1.

    Raises:
        ConfigError: no config is given, and this installation has no demo config.
        ServerError: the server did not start.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_at = time.monotonic()
    with_spec = _serve_and_stream("with speculation", args, [])
    without_spec = _serve_and_stream("without speculation", args, [PLAIN])
    result = compare(with_spec, without_spec)
    result["seconds"] = time.monotonic() - started_at
    print(
        f"\n{prompt_table(with_spec, without_spec)}\n\n{rank_table(with_spec.ranks)}\n\n{summary_table(result)}\n\n"
        f"{NEXT_STEPS}"
    )
    for difference in result["differences"]:
        print(f"not the same tokens: {difference}")
    for stream in [*with_spec.streams, *without_spec.streams]:
        if stream.error is not None:
            print(f"failed: {last_line(stream.prompt.text, NAME_WIDTH)}: {stream.error}")
    print(json_line(result), flush=True)
    return 0 if result["failed"] == 0 and result["identical"] else 1


def _serve_and_stream(title: str, args: argparse.Namespace, settings: list[str]) -> ServerFigures:
    server = ServerProcess([*args.settings, *settings], args.config)
    print(f"aerie serve, {title}: starting", end="", flush=True)
    with server:
        print(f", ready after {server.ready_s:.1f} s on port {server.port}", flush=True)
        figures = stream_rounds(server.port, title, args.max_tokens, args.rounds)
        figures.startup_s = server.ready_s
    figures.killed_processes = len(server.killed_processes)
    return figures


def stream_rounds(port: int, title: str, max_tokens: int, rounds: int) -> ServerFigures:
    """After an unmeasured warm-up, stream `rounds` times: all prompts at once, then only the first prompt."""
    model = served_model(port)
    stream_all(port, model, PROMPTS, min(WARM_UP_TOKENS, max_tokens))
    figures, counts_before = ServerFigures(), read_rank_counts(port)
    for round_number in range(1, rounds + 1):
        view = LiveView(f"{title}, round {round_number} of {rounds}", max_tokens)
        figures.batch_rounds.append(stream_all(port, model, PROMPTS, max_tokens, view))
        figures.single_rounds.append(stream_all(port, model, PROMPTS[:1], max_tokens))
    figures.ranks = counter_growth(counts_before, read_rank_counts(port))
    return figures


def compare(with_spec: ServerFigures, without_spec: ServerFigures) -> dict[str, Any]:
    """Return the figures of both sides, and where their tokens differ, JSON-ready."""
    differences, speeds = _differences(with_spec, without_spec), dict[str, float]()
    for suffix, figures in (("", with_spec), ("_plain", without_spec)):
        speeds[f"tokens_per_second{suffix}"] = median(
            [total_tokens_per_second(stream) for stream in figures.batch_rounds]
        )
        speeds[f"tokens_per_second_one_stream{suffix}"] = median(
            [total_tokens_per_second(stream) for stream in figures.single_rounds]
        )
        speeds[f"first_token_ms{suffix}"] = first_token_ms(
            [stream for streams in figures.batch_rounds for stream in streams]
        )
        speeds[f"startup_seconds{suffix}"] = figures.startup_s
    batch_key, single_key = "tokens_per_second", "tokens_per_second_one_stream"
    return {
        "failed": with_spec.failed + without_spec.failed,
        "identical": not differences,
        "accept_length": accept_length(with_spec.streams),
        "speedup": ratio(speeds[batch_key], speeds[f"{batch_key}_plain"]),
        "speedup_one_stream": ratio(speeds[single_key], speeds[f"{single_key}_plain"]),
        **speeds,
        "streams": len(with_spec.streams) + len(without_spec.streams),
        "processes_left": with_spec.killed_processes + without_spec.killed_processes,
        "ranks": rank_rows(with_spec.ranks),
        "differences": differences,
    }


def prompt_table(with_spec: ServerFigures, without_spec: ServerFigures) -> str:
    """Return a table with one line per prompt, from the rounds of all prompts. Speeds are medians over the rounds."""
    rows = []
    for index, prompt in enumerate(PROMPTS):
        spec_streams, plain_streams = (
            [r[index] for r in with_spec.batch_rounds],
            [r[index] for r in without_spec.batch_rounds],
        )
        rows.append(
            {
                "prompt": last_line(prompt.text, NAME_WIDTH),
                "T": prompt.temperature,
                "tokens": len(spec_streams[0].token_ids),
                "accept length": accept_length(spec_streams) or None,
                "tokens/s": median([s.tokens_per_second for s in spec_streams]),
                "without": median([s.tokens_per_second for s in plain_streams]),
                "same tokens": all(
                    a.token_ids == b.token_ids for a, b in zip(spec_streams, plain_streams, strict=True)
                ),
            }
        )
    return records_table(rows)


def summary_table(result: dict[str, Any]) -> str:
    """Return a table of the figures with and without speculation."""
    rows = [
        (name, result[key], result[f"{key}_plain"], ratio_text)
        for name, key, ratio_text in (
            (f"tokens/s, {len(PROMPTS)} streams at once", "tokens_per_second", f"{result['speedup']:.2f}x"),
            ("tokens/s, one stream", "tokens_per_second_one_stream", f"{result['speedup_one_stream']:.2f}x"),
            ("first token, ms", "first_token_ms", ""),
            ("start, s", "startup_seconds", ""),
        )
    ]
    rows.insert(0, ("accept length", result["accept_length"], 1.0, ""))
    same_text = "yes, every token" if result["identical"] else "NO"
    return (
        table(("", "speculation", "without", "ratio"), rows) + f"\nsame output: {same_text}; failed: {result['failed']}"
    )


def _differences(with_spec: ServerFigures, without_spec: ServerFigures) -> list[dict[str, Any]]:
    """Compare every stream of both servers with the stream of the same prompt in the first round without speculation.
    If the tokens differ, the result has the server, the prompt and the first position that differs, each combination
    once.
    """
    if not without_spec.batch_rounds:
        return []
    reference_tokens = [stream.token_ids for stream in without_spec.batch_rounds[0]]
    differences: dict[tuple[str, int, int], None] = {}
    for name, figures in (("speculation", with_spec), ("plain", without_spec)):
        for streams in (*figures.batch_rounds, *figures.single_rounds):
            for index, stream in enumerate(streams):
                position = first_difference(stream.token_ids, reference_tokens[index])
                if position is not None:
                    differences[name, index, position] = None
    return [{"side": name, "prompt": index, "position": position} for name, index, position in differences]
