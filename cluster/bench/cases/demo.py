"""`aerie demo`: serve the demo pair, stream eight prompts at once, and show the gain of speculation.

Requests take the same path as a user's: `aerie serve`, HTTP, server-sent events. The server runs twice, with and
without speculation. The tokens of both runs are compared, and the medians of their speeds over several rounds.
"""

import argparse
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.bench.live import LiveView, short
from cluster.bench.rank_counts import RankCounts, by_rank, rank_table, read_ranks, since
from cluster.bench.report import first_difference, json_line, median, ratio, records, table
from cluster.bench.server import ServerProcess
from cluster.bench.streams import ClientStream, Prompt, accept_length, first_token_ms, pace, run_together, served_model

PLAIN = "speculative_algorithm=null"
WARM_UP_TOKENS = 32
NEXT = """Where to look: `make serve` (or `aerie serve`) keeps the pair on http://127.0.0.1:8000
  /          a page of what the server does, and a playground that draws the tree of every step
  /docs      the API; /metrics and /server_info are beside it
  aerie chat --url http://127.0.0.1:8000, and aerie status --url the same, are its terminal
"""
NAME = 36
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
class Side:
    """The results of one server. `together`: rounds of all prompts at once. `alone`: rounds of only the first prompt.
    `left`: how many processes outlived the server and were killed.
    """

    startup_s: float = 0.0
    together: list[list[ClientStream]] = field(default_factory=list)
    alone: list[list[ClientStream]] = field(default_factory=list)
    left: int = 0
    ranks: dict[int, RankCounts] = field(default_factory=dict)

    @property
    def streams(self) -> list[ClientStream]:
        """All measured streams."""
        return [stream for streams in (*self.together, *self.alone) for stream in streams]

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
    began = time.monotonic()
    spec = _serve_and_stream("with speculation", args, [])
    plain = _serve_and_stream("without speculation", args, [PLAIN])
    result = compare(spec, plain)
    result["seconds"] = time.monotonic() - began
    print(f"\n{prompt_table(spec, plain)}\n\n{rank_table(spec.ranks)}\n\n{summary_table(result)}\n\n{NEXT}")
    for difference in result["differences"]:
        print(f"not the same tokens: {difference}")
    for stream in [*spec.streams, *plain.streams]:
        if stream.error is not None:
            print(f"failed: {short(stream.prompt.text, NAME)}: {stream.error}")
    print(json_line(result), flush=True)
    return 0 if result["failed"] == 0 and result["identical"] else 1


def _serve_and_stream(title: str, args: argparse.Namespace, settings: list[str]) -> Side:
    server = ServerProcess([*args.settings, *settings], args.config)
    print(f"aerie serve, {title}: starting", end="", flush=True)
    with server:
        print(f", ready after {server.ready_s:.1f} s on port {server.port}", flush=True)
        side = stream_rounds(server.port, title, args.max_tokens, args.rounds)
        side.startup_s = server.ready_s
    side.left = len(server.left)
    return side


def stream_rounds(port: int, title: str, max_tokens: int, rounds: int) -> Side:
    """After an unmeasured warm-up, stream `rounds` times: all prompts at once, then only the first prompt."""
    model = served_model(port)
    run_together(port, model, PROMPTS, min(WARM_UP_TOKENS, max_tokens))
    side, before = Side(), read_ranks(port)
    for number in range(1, rounds + 1):
        view = LiveView(f"{title}, round {number} of {rounds}", max_tokens)
        side.together.append(run_together(port, model, PROMPTS, max_tokens, view))
        side.alone.append(run_together(port, model, PROMPTS[:1], max_tokens))
    side.ranks = since(before, read_ranks(port))
    return side


def compare(spec: Side, plain: Side) -> dict[str, Any]:
    """Return the figures of both sides, and where their tokens differ, JSON-ready."""
    differences, paces = _differences(spec, plain), dict[str, float]()
    for of, side in (("", spec), ("_plain", plain)):
        paces[f"tokens_per_second{of}"] = median([pace(s) for s in side.together])
        paces[f"tokens_per_second_one_stream{of}"] = median([pace(s) for s in side.alone])
        paces[f"first_token_ms{of}"] = first_token_ms([s for streams in side.together for s in streams])
        paces[f"startup_seconds{of}"] = side.startup_s
    both, one = "tokens_per_second", "tokens_per_second_one_stream"
    return {
        "failed": spec.failed + plain.failed,
        "identical": not differences,
        "accept_length": accept_length(spec.streams),
        "speedup": ratio(paces[both], paces[f"{both}_plain"]),
        "speedup_one_stream": ratio(paces[one], paces[f"{one}_plain"]),
        **paces,
        "streams": len(spec.streams) + len(plain.streams),
        "processes_left": spec.left + plain.left,
        "ranks": by_rank(spec.ranks),
        "differences": differences,
    }


def prompt_table(spec: Side, plain: Side) -> str:
    """Return a table with one line per prompt, of medians over the rounds."""
    rows = []
    for at, prompt in enumerate(PROMPTS):
        mine, other = [r[at] for r in spec.together], [r[at] for r in plain.together]
        rows.append(
            {
                "prompt": short(prompt.text, NAME),
                "T": prompt.temperature,
                "tokens": len(mine[0].token_ids),
                "accept length": accept_length(mine) or None,
                "tokens/s": median([s.tokens_per_second for s in mine]),
                "without": median([s.tokens_per_second for s in other]),
                "same tokens": all(a.token_ids == b.token_ids for a, b in zip(mine, other, strict=True)),
            }
        )
    return records(rows)


def summary_table(result: dict[str, Any]) -> str:
    """Return a table with a column for each side."""
    rows = [
        (name, result[key], result[f"{key}_plain"], last)
        for name, key, last in (
            (f"tokens/s, {len(PROMPTS)} streams at once", "tokens_per_second", f"{result['speedup']:.2f}x"),
            ("tokens/s, one stream", "tokens_per_second_one_stream", f"{result['speedup_one_stream']:.2f}x"),
            ("first token, ms", "first_token_ms", ""),
            ("start, s", "startup_seconds", ""),
        )
    ]
    rows.insert(0, ("accept length", result["accept_length"], 1.0, ""))
    same = "yes, every token" if result["identical"] else "NO"
    return table(("", "speculation", "without", "ratio"), rows) + f"\nsame output: {same}; failed: {result['failed']}"


def _differences(spec: Side, plain: Side) -> list[dict[str, Any]]:
    """Return where the tokens of any round, of either side, differ from the first round without speculation."""
    if not plain.together:
        return []
    truth = [stream.token_ids for stream in plain.together[0]]
    found: dict[tuple[str, int, int], None] = {}
    for name, side in (("speculation", spec), ("plain", plain)):
        for streams in (*side.together, *side.alone):
            for at, stream in enumerate(streams):
                where = first_difference(stream.token_ids, truth[at])
                if where is not None:
                    found[name, at, where] = None
    return [{"side": name, "prompt": at, "position": where} for name, at, where in found]
