"""Cause a fault in a server with open streams (kill, freeze or slow down a process), and observe its /health."""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cluster.bench.server import TWO_RANKS, ServerProcess
from cluster.bench.streams import HOST, ClientStream, Prompt, errors_of, page, run_together, served_model

GANG = ("dtype=float64", *TWO_RANKS)
OPEN_TOKENS = 6  # a fault waits until streams have this many tokens
WAIT_S = 120.0
POLL_S = 0.02
SLOW_S = 12.0
SLOW_ON_S, SLOW_OFF_S = 0.01, 0.09  # a slowed process runs for `SLOW_ON_S`, then is stopped for `SLOW_OFF_S`, and so on
REPLICA, ENGINE = "ServeReplica:", "-engine"  # parts of Ray's name for the process of an engine replica


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """The prompts that every round streams. `wanted` has the streams of a run without a fault, in the same order."""

    model: str
    prompts: Sequence[Prompt]
    max_tokens: int
    wanted: Sequence[ClientStream]

    def different(self, streams: Sequence[ClientStream]) -> int:
        """Return how many streams finished with tokens that differ from those without a fault."""
        pairs = zip(streams, self.wanted, strict=True)
        return sum(stream.error is None and stream.token_ids != wanted.token_ids for stream, wanted in pairs)


def undisturbed(server: ServerProcess, prompts: Sequence[Prompt], max_tokens: int) -> StreamLoad:
    """Stream all prompts once without a fault.

    Raises:
        RuntimeError: a stream failed without a fault.
    """
    model = served_model(server.port)
    wanted = run_together(server.port, model, prompts, max_tokens)
    if errors := errors_of(wanted):
        raise RuntimeError(f"the undisturbed run failed: {errors[0]}")
    return StreamLoad(model, prompts, max_tokens, wanted)


class Fault:
    """One fault, such as "kill rank 0", caused while streams run. `open` streams were unfinished at that moment.

    `unhealthy_s`: seconds from the fault until /health failed. `healthy_s`: until /health answered 200 again. Both are
    None if that has not happened.
    """

    def __init__(self, server: ServerProcess, what: str, due: Callable[[list[ClientStream]], bool]) -> None:
        """`what` is a verb (kill, freeze, slow) and a victim. The fault happens once `due(streams)` is true."""
        self.verb, _, self.whom = what.partition(" ")
        self.before = server_info(server.port)
        self.open = 0
        self.unhealthy_s: float | None = None
        self.healthy_s: float | None = None
        self._server, self._due = server, due
        self._began: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    @property
    def seconds(self) -> float | None:
        """Seconds since the fault; None before it."""
        return None if self._began is None else time.monotonic() - self._began

    def look(self, streams: list[ClientStream]) -> None:
        """Cause the fault if it is due. Call it repeatedly while the streams run."""
        if self._began is not None or not self._due(streams):
            return
        victim = victim_of(self._server, self.before, self.whom)
        self.open = sum(stream.ended is None for stream in streams)
        self._began = time.monotonic()
        self._thread.start()
        hurt(self.verb, victim)

    def settle(self) -> None:
        """Wait until the server is healthy again, at most `WAIT_S`, then stop polling /health.

        A slowed process loses no gang, so after such a fault there is no wait.
        """
        if self._began is None:
            return
        if self.verb != "slow":
            self._thread.join(WAIT_S)
        self._over.set()
        self._thread.join()

    def losses(self, after: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the gang losses since the fault. `after` is the server's info, read after the fault."""
        # A new replica does not know the losses of the killed replica.
        known = 0 if self.whom == "replica" else len(self.before.get("restarts", ()))
        losses: list[dict[str, Any]] = after.get("restarts", [])[known:]
        return losses

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            asked_s = self.seconds
            well = is_healthy(self._server.port)
            if not well and self.unhealthy_s is None:
                self.unhealthy_s = asked_s
            if well and self.unhealthy_s is not None:
                self.healthy_s = self.seconds
                return


def victim_of(server: ServerProcess, info: dict[str, Any], whom: str) -> int:
    """Return the pid of the process `whom` names: "replica" (the engine's), or a rank listed in `info`."""
    if whom == "replica":
        (engine,) = [p.pid for p in server.processes() if REPLICA in p.name and ENGINE in p.name]
        return engine
    return int(next(rank["pid"] for rank in info["ranks"] if rank["rank"] == int(whom.split()[1])))


def hurt(verb: str, pid: int) -> None:
    """Do `verb` to a process: kill it, freeze it, or slow it down for `SLOW_S` from a thread."""
    if verb == "kill":
        os.kill(pid, signal.SIGKILL)
    elif verb == "freeze":
        os.kill(pid, signal.SIGSTOP)
    else:
        threading.Thread(target=slow_down, args=(pid, SLOW_S), daemon=True).start()


def slow_down(pid: int, seconds: float) -> None:
    """For `seconds`, stop the process and let it continue, again and again, so that it runs a tenth of the time."""
    until = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SLOW_OFF_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLOW_ON_S)


def is_healthy(port: int) -> bool:
    """Return whether /health answers 200."""
    with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10) as answer:
        return bool(answer.status == 200)
    return False


def server_info(port: int) -> dict[str, Any]:
    """Return the JSON object of /server_info."""
    info: dict[str, Any] = json.loads(page(port, "/server_info"))
    return info


def idle_info(port: int) -> dict[str, Any]:
    """Wait until ranks report and none runs a request or uses pages, at most 20 s; then return /server_info."""
    until = time.monotonic() + 20.0
    while True:
        info = server_info(port)
        ranks = info.get("ranks", [])
        if (ranks and not any(rank["pages_used"] or rank["running"] for rank in ranks)) or time.monotonic() > until:
            return info
        time.sleep(0.2)
