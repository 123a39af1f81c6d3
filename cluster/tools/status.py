"""`aerie status`: a table of a server's state, redrawn every second."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any

from cluster.tools.client import Client, NoAnswerError, add_server_arguments
from cluster.tools.server_state import ServerWatch
from cluster.tools.terminal import Colour, Screen

URL = "http://127.0.0.1:8000"
INTERVAL_S = 1.0
TIMEOUT_S = 3.0
REASON_WIDTH = 76
HEADERS = ("rank", "state", "step", "phase", "running", "waiting", "KV used", "cached", "accept length")

Line = tuple[str, Colour | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie status`."""
    add_server_arguments(parser, URL)
    parser.add_argument("--once", action="store_true", help="print the table once, over one second, and end")
    parser.add_argument("--json", action="store_true", help="print an object per second in place of the table")


def run(args: argparse.Namespace) -> int:
    """Redraw the table until Ctrl-C, or print it once. Return 1 if `--once` is given and the server cannot be reached.

    Raises:
        ConfigError: the URL is invalid.
    """
    watch, screen = ServerWatch(Client(args.url, args.api_key, TIMEOUT_S)), Screen()
    try:
        if args.once:
            watch.poll()
            time.sleep(INTERVAL_S)  # tokens per second need two polls
            _show(watch.poll(), args.json, screen)
            return 0
        while True:
            started_at = time.monotonic()
            _show(_poll(watch), args.json, screen)
            time.sleep(max(0.0, started_at + INTERVAL_S - time.monotonic()))
    except NoAnswerError as error:
        print(f"aerie status: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _poll(watch: ServerWatch) -> dict[str, Any]:
    try:
        return watch.poll()
    except NoAnswerError as error:
        return {"error": str(error)}


def _show(state: dict[str, Any], as_json: bool, screen: Screen) -> None:
    if as_json:
        print(json.dumps(state), flush=True)
    else:
        screen.redraw([(f"{state['error']}; trying again", "red")] if "error" in state else lines_of(state))


def lines_of(state: dict[str, Any]) -> list[Line]:
    """Return the lines of the table, each with its colour."""
    names = ("streaming", "waiting", "losses", "restarts", "resumed_streams")
    figures = (
        f"{_figure(state['tokens_per_second'], 1)} tokens/s",
        f"accept length {_figure(state['accept_length'])}",
        *(f"{name.replace('_', ' ')} {state[name]}" for name in names),
    )
    lines: list[Line] = [(f"{state['model']} at {state['url']}, version {state['version']}", None)]
    lines.append(("   ".join(figures), None))
    for gang in state["gangs"]:
        lines += [("", None), *_gang_lines(gang)]
    return lines


def _gang_lines(gang: dict[str, Any]) -> list[Line]:
    age_text = "" if gang["age_s"] < 2 * INTERVAL_S else f", {gang['age_s']:.0f} s ago"
    prefix = f"gang {gang['gang']}, incarnation {gang['epoch']}, {gang['queued_tokens']} tokens queued{age_text}: "
    lines: list[Line] = [(prefix + "serving", "green")] if gang["healthy"] else [(prefix + "not serving", "red")]
    lines += [(f"  {line}", "red") for line in wrap(gang["reason"], REASON_WIDTH)]
    header, *rows = columns([HEADERS, *map(_cells, gang["ranks"])])
    lines += [(header, "dim"), *((row, None) for row in rows)]
    if gang["restarts"]:
        lines.append((_loss_line(gang["restarts"][-1]), "dim"))
    return lines


def _cells(rank: dict[str, Any]) -> tuple[str, ...]:
    if rank["state"] == "silent":
        return (str(rank["rank"]), "silent", *["-"] * (len(HEADERS) - 2))
    numbers = (str(rank["step"]), rank["phase"] or "-", str(rank["running"]), str(rank["waiting"]))
    kv_and_accept_length = (
        f"{rank['kv_used']:.0%}",
        f"{rank['kv_cached']:.0%}",
        _figure(rank["accept_length"] or None),
    )
    return (str(rank["rank"]), rank["state"], *numbers, *kv_and_accept_length)


def _loss_line(loss: dict[str, Any]) -> str:
    lost_at = datetime.fromtimestamp(loss["at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    recovery = "not back yet" if loss["restored_s"] is None else f"served again after {loss['restored_s']:.1f} s"
    return f"latest loss, {lost_at}: rank {loss['rank']} {loss['kind']} at step {loss['step']}; {recovery}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, with each column aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
