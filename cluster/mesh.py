"""The ranks of a gang, the axes (groups) that they form, and every collective. One rank alone needs no process group.

World: `tp_size` ranks in `attn_dp` groups of `attn_tp` ranks each; rank = dp_rank * attn_tp + attn_tp_rank. Facts
(rows of integers) travel over gloo, tensors over NCCL on GPUs and gloo on CPUs. A wrong size ends a gloo process
without a Python exception, so callers (`cluster.dp_attention`) compare sizes before they enter a collective.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.clock import Clock
from cluster.logs import first_line
from cluster.timing import HOST, EventTimer, Timer

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]

COLLECTIVE_TIMEOUT = timedelta(seconds=600)  # a last resort: the supervisor of the gang acts long before
JOIN_TIMEOUT = timedelta(seconds=120)
NAP = timedelta(seconds=60)
FAREWELL_S = 0.5  # how long a rank that lost a peer waits for the reasons of the others


class GangError(RuntimeError):
    """The gang cannot go on. `rank` is the one to blame as far as known, `step` and `phase` where it was noticed."""

    def __init__(self, message: str, rank: int | None, step: int, phase: str) -> None:
        super().__init__(message)
        self.rank, self.step, self.phase = rank, step, phase


class PeerLostError(GangError):
    """A peer is gone or silent."""


class OutOfStepError(GangError):
    """Ranks disagree on what comes next; raised before any tensor moves."""


class Part(NamedTuple):
    """Shard `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> tuple[int, int]:
        """This shard's `[start, stop)` of `total` items; shards differ by at most one item."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size


class Rendezvous(NamedTuple):
    """Where the ranks of a gang meet. `epoch` counts the starts of the gang."""

    host: str
    port: int
    epoch: int = 0


class Store:
    """The key-value store of a gang, kept by rank 0. It listens on one address only."""

    def __init__(self, tcp: Any, port: int) -> None:
        self.tcp, self.port = tcp, port


def open_store(host: str) -> Store:
    """Open a store that listens on `host`, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    port: int = listener.getsockname()[1]
    # A socket that TCPStore opens itself listens on all addresses, whatever the host given.
    tcp = TCPStore(host, port, None, True, JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    return Store(tcp, port)


@dataclass(slots=True)
class Axis:
    """Ranks that share work. `group` is None when this rank is alone; then every collective is the identity.

    `direct` (NCCL): parts of equal size go through the backend's own all-gather and reduce-scatter. Else an all-to-all
    is used, which takes any sizes and is twice as fast on gloo; sums in rank order have the same bits on every rank.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    direct: bool = False
    clock: Clock = field(default_factory=Clock)
    timer: Timer = HOST

    @property
    def part(self) -> Part:
        """This rank's shard of what the axis splits."""
        return Part(self.rank, self.size)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Own rows `[counts[rank], ..]` -> all ranks' rows `[sum(counts), ..]`, in rank order."""
        if self.size == 1:
            return rows
        every = rows.new_empty(sum(counts), *rows.shape[1:])
        began = self.clock.begin(self.timer)
        if self.direct and len(set(counts)) == 1:
            dist.all_gather_into_tensor(every, rows.contiguous(), group=self.group)
        else:
            own = rows.repeat(self.size, *[1] * (rows.dim() - 1))
            dist.all_to_all_single(every, own, list(counts), [rows.shape[0]] * self.size, group=self.group)
        self.clock.end(began, self.timer)
        return every

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Partial sums of all ranks' rows `[sum(counts), ..]` -> own rows `[counts[rank], ..]`, summed."""
        if self.size == 1:
            return rows
        own = counts[self.rank]
        began = self.clock.begin(self.timer)
        if self.direct and len(set(counts)) == 1:
            summed = rows.new_empty(own, *rows.shape[1:])
            dist.reduce_scatter_tensor(summed, rows.contiguous(), group=self.group)
            self.clock.end(began, self.timer)
            return summed
        parts = rows.new_empty(self.size * own, *rows.shape[1:])
        dist.all_to_all_single(parts, rows.contiguous(), [own] * self.size, list(counts), group=self.group)
        self.clock.end(began, self.timer)
        return added(parts.view(self.size, own, *rows.shape[1:]))

    def all_to_all(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Rows in rank order of whom they go to, `sent[r]` to rank r -> those that come, `taken[r]` from rank r.

        What one rank sends to another is what the other takes from it: callers agree on both before.
        """
        if self.size == 1:
            return rows
        came = rows.new_empty(sum(taken), *rows.shape[1:])
        began = self.clock.begin(self.timer)
        dist.all_to_all_single(came, rows.contiguous(), list(taken), list(sent), group=self.group)
        self.clock.end(began, self.timer)
        return came

    def all_reduce(self, rows: Tensor) -> Tensor:
        """Partial sums of the same rows -> their sum, with the same bits on every rank."""
        if self.size == 1:
            return rows
        if not self.direct:
            return added(self.gather(rows, [rows.shape[0]] * self.size).view(self.size, *rows.shape))
        began = self.clock.begin(self.timer)
        dist.all_reduce(rows, group=self.group)
        self.clock.end(began, self.timer)
        return rows

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite `values` on all ranks with the first rank's, in place."""
        if self.size > 1:
            began = self.clock.begin(self.timer)
            dist.broadcast(values, group=self.group, group_src=0)
            self.clock.end(began, self.timer)
        return values

    def leave(self) -> None:
        """Drop the group: gloo closes its connections only when nothing refers to them, even after an abort."""
        self.group = None


def added(parts: Tensor) -> Tensor:
    """The sum over the first dimension, added in order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass(slots=True)
class Mesh:
    """This rank's place: the axes of the world and of its attention group, and the store of the gang.

    `facts` and `attn_facts` are the same two axes over gloo; on a CPU they are `world` and `attn` themselves.
    `position` is the (step, phase) of this rank, for other threads to read. `bell` is a second connection to the store,
    since `sleep` blocks the first, `store`.
    """

    rank: int = 0
    world: Axis = field(default_factory=Axis)
    attn: Axis = field(default_factory=Axis)
    facts: Axis = field(default_factory=Axis)
    attn_facts: Axis = field(default_factory=Axis)
    epoch: int = 0
    position: tuple[int, str] = (0, "start")
    store: Any = None
    bell: Any = None
    _closed: bool = False

    @property
    def attn_dp(self) -> int:
        """The number of attention groups."""
        return self.world.size // self.attn.size

    @property
    def dp_rank(self) -> int:
        """This rank's attention group."""
        return self.rank // self.attn.size

    @property
    def leads(self) -> bool:
        """Whether this rank schedules for its attention group."""
        return self.attn.rank == 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note that this rank enters a phase, of its current step or of `step`."""
        self.position = (self.position[0] if step is None else step, phase)

    def all_gather_row(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        """One row of plain integers from every rank, in rank order."""
        if self.facts.size == 1:
            return [row]
        every = self.facts.gather(torch.tensor([row], dtype=torch.int64), [1] * self.facts.size)
        return [tuple(line) for line in every.tolist()]

    def everyones(self, name: str, text: str) -> list[str]:
        """Publish `text` under `name`, wait for all ranks, and return their texts in rank order."""
        if self.store is None:
            return [text]
        self.store.set(f"{name}/{self.rank}", text)
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.world.size)]

    def sleep(self, step: int) -> None:
        """Wait, without using the CPU, until a rank calls `ring` for this step; an earlier `ring` counts.

        Raises:
            PeerLostError: the gang is gone.
        """
        assert self.store is not None
        while not self._closed:
            try:
                self.store.wait([f"ring/{step}"], NAP)
                return
            except dist.DistStoreError:
                continue
            except RuntimeError as error:
                raise PeerLostError(f"rank 0 is gone: {first_line(error)}", 0, step, "asleep") from error

    def ring(self, step: int) -> None:
        """Wake every rank that sleeps at `step`; any thread may call this."""
        if self.bell is not None and not self._closed:
            try:
                self.bell.set(f"ring/{step}", "1")
            except RuntimeError:
                return  # rank 0 is gone; sleeping ranks notice it themselves

    def forget(self, step: int) -> None:
        """Delete the key of `ring` for an earlier step, from which every rank has long woken."""
        if self.rank == 0 and step >= 0 and self.bell is not None:
            self.bell.delete_key(f"ring/{step}")

    def explain(self, error: RuntimeError) -> PeerLostError:
        """The error to raise for a collective that failed because a peer left; waits a moment for the others' reasons.

        A rank that only noticed the failure leaves a reason that begins with "messenger"; one that leaves none is dead.
        """
        step, phase = self.position
        self.leave_reason(f"messenger {first_line(error)}")
        silent: list[int] = list(range(self.world.size))
        until = time.monotonic() + FAREWELL_S
        try:
            while silent and time.monotonic() < until:
                silent = [r for r in silent if not self._said(r)]
                for rank in set(range(self.world.size)) - set(silent):
                    reason = self._reason(rank)
                    if not reason.startswith("messenger "):
                        return PeerLostError(f"rank {rank} left: {reason}", rank, step, phase)
                time.sleep(0.01)
        except RuntimeError:
            silent = [0]  # the store went with rank 0
        if not silent:
            return PeerLostError(f"a peer closed its connection: {first_line(error)}", None, step, phase)
        names = " and ".join(str(rank) for rank in silent)
        return PeerLostError(f"rank {names} is gone (step {step}, phase {phase})", silent[0], step, phase)

    def leave_reason(self, reason: str) -> None:
        """Tell the peers why this rank leaves; the first reason given stays."""
        if self.bell is not None:
            try:
                self.bell.compare_set(f"left/{self.rank}", "", reason)
            except RuntimeError:
                return

    def _said(self, rank: int) -> bool:
        assert self.bell is not None
        return bool(self.bell.check([f"left/{rank}"]))

    def _reason(self, rank: int) -> str:
        assert self.bell is not None
        reason: str = self.bell.get(f"left/{rank}").decode()
        return reason

    def close(self, reason: str = "") -> None:
        """Leave the gang: peers that wait for this rank get an error at once, and can read `reason`."""
        if self._closed:
            return
        self._closed = True
        if reason:
            self.leave_reason(reason)
        if self.world.size > 1 and dist.is_initialized():
            # Aborting, unlike destroying, also releases a thread of this rank that waits in a collective.
            dist.distributed_c10d._abort_process_group()
            for axis in (self.world, self.attn, self.facts, self.attn_facts):
                axis.leave()


def join(
    rank: int, world: int, attn_dp: int, rendezvous: Rendezvous, device: torch.device, store: Store | None
) -> Mesh:
    """Meet the other ranks; returns once all have joined. Rank 0 passes the `store` that it opened.

    Raises:
        PeerLostError: a rank did not join.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "0")
    try:
        tcp = store.tcp if store is not None else _client(rendezvous)
        prefix = PrefixStore(f"epoch/{rendezvous.epoch}", tcp)
        if dist.is_initialized():
            dist.destroy_process_group()
        attn_tp = world // attn_dp
        groups = [list(range(g * attn_tp, (g + 1) * attn_tp)) for g in range(attn_dp)]
        with threads_run_first():
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
            facts, attn_facts = _axes(rank, world, groups, "gloo", Clock())
        axes = (facts, attn_facts)
        if device.type == "cuda":
            axes = _axes(rank, world, groups, "nccl", facts.clock)
    except RuntimeError as error:
        raise PeerLostError(f"the ranks did not meet: {first_line(error)}", None, 0, "join") from error
    return Mesh(rank, *axes, facts, attn_facts, rendezvous.epoch, (0, "join"), _client(rendezvous), _client(rendezvous))


@contextmanager
def threads_run_first() -> Iterator[None]:
    """Give the threads that are started in this block real-time priority, where the system allows it (CAP_SYS_NICE).

    gloo's threads hardly compute, but other ranks wait for what they carry. On a host with as many ranks as cores, each
    would wait for a computing thread's time slice to end: up to 4 ms, several times a step.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, OSError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _client(rendezvous: Rendezvous) -> Any:
    return TCPStore(rendezvous.host, rendezvous.port, None, False, JOIN_TIMEOUT, wait_for_workers=False)


def _axes(rank: int, world: int, groups: list[list[int]], backend: str, clock: Clock) -> tuple[Axis, Axis]:
    """The axes of the world and of this rank's attention group; every rank makes all groups, in the same order."""
    direct = backend == "nccl"
    timer = EventTimer() if direct else HOST
    whole = Axis(rank, world, dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT), direct, clock, timer)
    attn_tp = len(groups[0])
    if attn_tp == 1:
        return whole, Axis(clock=clock)
    made = [dist.new_group(ranks, backend=backend, timeout=COLLECTIVE_TIMEOUT) for ranks in groups]
    return whole, Axis(rank % attn_tp, attn_tp, made[rank // attn_tp], direct, clock, timer)
