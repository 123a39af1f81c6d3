"""Kill, freeze or slow down a process of a server with open streams, and observe the server's /health."""

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
from cluster.bench.streams import HOST, ClientStream, Prompt, get_page, served_model, stream_all, stream_errors

GANG_SETTINGS = ("dtype=float64", *TWO_RANKS)
MIN_STREAM_TOKENS = 6  # cases cause a fault once enough streams have this many tokens
HEALTHY_TIMEOUT_S = 120.0
POLL_S = 0.02
SLOWDOWN_S = 12.0
RUN_SLICE_S, STOP_SLICE_S = 0.01, 0.09  # times for which a slowed process runs and is stopped, in turns
REPLICA_PREFIX, ENGINE_PART = "ServeReplica:", "-engine"  # parts of Ray's name for the process of an engine replica


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """The prompts that are streamed again for every fault. `reference_streams` are their streams in a run without a
    fault, in the same order.
    """

    model: str
    prompts: Sequence[Prompt]
    max_tokens: int
    reference_streams: Sequence[ClientStream]

    def count_different(self, streams: Sequence[ClientStream]) -> int:
        """Return how many streams ended without an error, but with other tokens than in the run without a fault."""
        pairs = zip(streams, self.reference_streams, strict=True)
        return sum(stream.error is None and stream.token_ids != reference.token_ids for stream, reference in pairs)


def run_without_fault(server: ServerProcess, prompts: Sequence[Prompt], max_tokens: int) -> StreamLoad:
    """Stream all prompts once without a fault, and return them with their streams.

    Raises:
        RuntimeError: a stream failed without a fault.
    """
    model = served_model(server.port)
    reference_streams = stream_all(server.port, model, prompts, max_tokens)
    if errors := stream_errors(reference_streams):
        raise RuntimeError(f"the run without a fault failed: {errors[0]}")
    return StreamLoad(model, prompts, max_tokens, reference_streams)


class Fault:
    """One fault, such as "kill rank 0", caused while streams run. `open_streams` counts the streams that are unfinished
    when the fault happens.

    `unhealthy_s` is the seconds from the fault until /health failed, or None if it has not failed. `healthy_s` is the
    seconds from the fault until /health answered 200 again, or None if it has not done so.
    """

    def __init__(self, server: ServerProcess, description: str, is_due: Callable[[list[ClientStream]], bool]) -> None:
        """`description` is a verb (kill, freeze, slow) and a victim: "replica" or "rank N". The fault happens once
        `is_due` returns true.
        """
        self.verb, _, self.victim = description.partition(" ")
        self.info_before = server_info(server.port)
        self.open_streams = 0
        self.unhealthy_s: float | None = None
        self.healthy_s: float | None = None
        self._server, self._is_due = server, is_due
        self._fault_at: float | None = None
        self._stop_polling = threading.Event()
        self._thread = threading.Thread(target=self._poll_health, daemon=True)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the fault; None before it."""
        return None if self._fault_at is None else time.monotonic() - self._fault_at

    def trigger_if_due(self, streams: list[ClientStream]) -> None:
        """Cause the fault if it is due. Call it repeatedly while the streams run."""
        if self._fault_at is not None or not self._is_due(streams):
            return
        pid = victim_pid(self._server, self.info_before, self.victim)
        self.open_streams = sum(stream.ended_at is None for stream in streams)
        self._fault_at = time.monotonic()
        self._thread.start()
        apply_fault(self.verb, pid)

    def wait_until_healthy(self) -> None:
        """Wait until the server is healthy again, at most `HEALTHY_TIMEOUT_S`. Then stop polling /health.

        Do not wait if the fault has not happened, or if the process was only slowed down: then the server stays up.
        """
        if self._fault_at is None:
            return
        if self.verb != "slow":
            self._thread.join(HEALTHY_TIMEOUT_S)
        self._stop_polling.set()
        self._thread.join()

    def gang_failures(self, info_after: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the losses of a gang (all ranks of a replica) since the fault. `info_after` is the answer of
        /server_info, read after the fault.
        """
        # A new replica's list starts empty: it does not know the losses of the killed replica.
        earlier_count = 0 if self.victim == "replica" else len(self.info_before.get("restarts", ()))
        failures: list[dict[str, Any]] = info_after.get("restarts", [])[earlier_count:]
        return failures

    def _poll_health(self) -> None:
        while not self._stop_polling.wait(POLL_S):
            probe_started_s = self.elapsed_s
            healthy = is_healthy(self._server.port)
            if not healthy and self.unhealthy_s is None:
                self.unhealthy_s = probe_started_s
            if healthy and self.unhealthy_s is not None:
                self.healthy_s = self.elapsed_s
                return


def victim_pid(server: ServerProcess, info: dict[str, Any], victim: str) -> int:
    """Return the pid of the process that `victim` names. "replica" is the Ray Serve replica of the engine; "rank N" is
    a rank that `info`, the answer of /server_info, lists.
    """
    if victim == "replica":
        (pid,) = [p.pid for p in server.processes() if REPLICA_PREFIX in p.name and ENGINE_PART in p.name]
        return pid
    return int(next(rank["pid"] for rank in info["ranks"] if rank["rank"] == int(victim.split()[1])))


def apply_fault(verb: str, pid: int) -> None:
    """Do `verb` to a process: kill it, freeze it, or let a thread slow it down for `SLOWDOWN_S`; do not wait."""
    if verb == "kill":
        os.kill(pid, signal.SIGKILL)
    elif verb == "freeze":
        os.kill(pid, signal.SIGSTOP)
    else:
        threading.Thread(target=slow_down, args=(pid, SLOWDOWN_S), daemon=True).start()


def slow_down(pid: int, seconds: float) -> None:
    """For `seconds`, stop the process and let it continue, again and again, so that it runs a tenth of the time."""
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOP_SLICE_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUN_SLICE_S)


def is_healthy(port: int) -> bool:
    """Return whether /health answers 200."""
    with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10) as response:
        return bool(response.status == 200)
    return False


def server_info(port: int) -> dict[str, Any]:
    """Return the JSON object of /server_info."""
    info: dict[str, Any] = json.loads(get_page(port, "/server_info"))
    return info


def info_when_idle(port: int) -> dict[str, Any]:
    """Wait until ranks are listed and none runs a request or uses KV pages, at most 20 s. Return the last answer of
    /server_info.
    """
    deadline = time.monotonic() + 20.0
    while True:
        info = server_info(port)
        ranks = info.get("ranks", [])
        if (ranks and not any(rank["pages_used"] or rank["running"] for rank in ranks)) or time.monotonic() > deadline:
            return info
        time.sleep(0.2)
