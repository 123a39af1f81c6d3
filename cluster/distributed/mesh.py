"""The ranks of a gang (those of one replica) and the axes (process groups) that they form. A single rank needs no
process group.

World: `tp_size` ranks in `attn_dp` groups of `attn_tp` ranks each; rank = dp_rank * attn_tp + attn_tp_rank. Facts
(rows of integers) travel over gloo; tensors travel over NCCL on GPUs and over gloo on CPUs.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cluster.device.timing import HOST_TIMER, EventTimer
from cluster.distributed import nccl
from cluster.distributed.errors import (
    ExitReason,
    ExitReasons,
    GangError,
    OutOfStepError,
    PeerLostError,
    StuckDeviceError,
)
from cluster.distributed.heartbeat import HeartbeatMonitor
from cluster.distributed.process_group import Axis, Shard, sum_in_order
from cluster.distributed.progress import ProgressClock
from cluster.observability.logs import first_line

__all__ = [
    "Axis",
    "GangError",
    "Mesh",
    "OutOfStepError",
    "PeerLostError",
    "Rendezvous",
    "Shard",
    "Store",
    "StuckDeviceError",
    "join",
    "open_store",
    "sum_in_order",
    "with_realtime_threads",
]

logger = logging.getLogger(__name__)

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]

COLLECTIVE_TIMEOUT = timedelta(seconds=600)  # a last resort: the replica ends a gang that is stuck long before
JOIN_TIMEOUT = timedelta(seconds=120)
SLEEP_POLL_TIMEOUT = timedelta(seconds=60)  # one wait of a sleeping rank; it is repeated until a rank wakes the others


class Rendezvous(NamedTuple):
    """Where the ranks of a gang meet. `epoch` is 0 at its first start; each attempt to restart it adds 1."""

    host: str
    port: int
    epoch: int = 0


class Store:
    """The key-value store of a gang, in the process of rank 0. `tcp` is the TCPStore, which listens at `port` of one
    address only.
    """

    def __init__(self, tcp: Any, port: int) -> None:
        self.tcp, self.port = tcp, port


def open_store(host: str) -> Store:
    """Open a store on rank 0 that listens on `host`, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    port: int = listener.getsockname()[1]
    # TCPStore is given a bound socket: one that it opens itself listens on all addresses, whatever the host.
    tcp = TCPStore(host, port, None, True, JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    return Store(tcp, port)


@dataclass(slots=True)
class Mesh:
    """This rank's place in its gang (the ranks of one replica): the axis of all ranks (`world`), the axis of its
    attention group (`attn`), and the gang's key-value store. An axis is a group of ranks and its collectives.

    `facts` and `attn_facts` are the same two axes over gloo; in a gang on CPUs they are `world` and `attn` themselves.
    `position` is the (step, phase) of this rank, readable by other threads. `store` and `wake_store` are two
    connections to the store, because the method `sleep` blocks one of them; a rank without peers has neither.
    `heartbeat_monitor` is None on CPUs, where collectives report a dead peer.
    """

    rank: int = 0
    world: Axis = field(default_factory=Axis)
    attn: Axis = field(default_factory=Axis)
    facts: Axis = field(default_factory=Axis)
    attn_facts: Axis = field(default_factory=Axis)
    epoch: int = 0
    position: tuple[int, str] = (0, "start")
    store: Any = None
    wake_store: Any = None
    _exit_reasons: ExitReasons | None = None
    heartbeat_monitor: HeartbeatMonitor | None = None
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
    def is_leader(self) -> bool:
        """Whether this rank is the leader of its attention group, which schedules for the group."""
        return self.attn.rank == 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Record in `position` that this rank enters `phase` of `step`; if `step` is None, of the current step."""
        self.position = (self.position[0] if step is None else step, phase)

    def all_gather_row(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All-gather one row of integers: return the rows of all ranks, in rank order."""
        if self.facts.size == 1:
            return [row]
        gathered = self.facts.gather(torch.tensor([row], dtype=torch.int64), [1] * self.facts.size)
        return [tuple(rank_row) for rank_row in gathered.tolist()]

    def all_gather_text(self, name: str, text: str) -> list[str]:
        """Publish `text` under `name` in the store, wait for all ranks, and return their texts in rank order."""
        if self.store is None:
            return [text]
        self.store.set(f"{name}/{self.rank}", text)
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.world.size)]

    def sleep(self, step: int) -> None:
        """Wait, without using the CPU, until any rank calls `wake_ranks` for this step. Return at once if a rank has
        already called it, or if this mesh is closed.

        Raises:
            PeerLostError: rank 0, which keeps the store, is gone.
        """
        assert self.store is not None
        while not self._closed:
            try:
                self.store.wait([f"ring/{step}"], SLEEP_POLL_TIMEOUT)
                return
            except dist.DistStoreError:
                continue
            except RuntimeError as error:
                raise PeerLostError(f"rank 0 is gone: {first_line(error)}", 0, step, "asleep") from error

    def wake_ranks(self, step: int) -> None:
        """Wake every rank that sleeps at `step`; any thread may call this."""
        if self.wake_store is not None and not self._closed:
            try:
                self.wake_store.set(f"ring/{step}", "1")
            except RuntimeError:
                return  # rank 0 is gone; sleeping ranks notice it themselves

    def delete_wake_key(self, step: int) -> None:
        """On rank 0, delete the key that `wake_ranks` set in the store for an earlier step (below 0: there is none).
        Every rank must have woken from that step.
        """
        if self.rank == 0 and step >= 0 and self.wake_store is not None:
            self.wake_store.delete_key(f"ring/{step}")

    def start_heartbeats(self, store: Any) -> None:
        """Start the heartbeats of this rank; `store` is a connection used by nothing else."""
        assert self._exit_reasons is not None, "a rank alone has no peers"
        clock, group = self.world.clock, self.facts.group
        # The prefix is that of `ExitReasons`, whose key `ALARM_KEY` the monitor waits for.
        self.heartbeat_monitor = HeartbeatMonitor(
            PrefixStore("exit_reasons", store), self._exit_reasons, clock, lambda: self.position, group
        )
        self.heartbeat_monitor.start()

    def explain(self, cause: str) -> PeerLostError:
        """Return the error to raise for `cause`, which the loss of a peer has caused; see `ExitReasons.explain`."""
        assert self._exit_reasons is not None, "a rank alone has no peers"
        return self._exit_reasons.explain(
            cause, *self.position, None if self.heartbeat_monitor is None else self.heartbeat_monitor.is_fresh
        )

    def peer_loss(self, error: RuntimeError, *, in_collective: bool = False) -> PeerLostError | None:
        """Return the `PeerLostError` to raise if the loss of a peer caused `error`, or None if the error is this rank's
        own. `in_collective` says that a collective raised `error`.

        If a lost peer breaks a collective, CUDA reports the error only in a later call. So an error of the device
        counts as a loss only if an exit reason blames a peer.
        """
        if self.world.size == 1:
            return None
        if nccl.is_device_error(error) and self._exit_reasons is not None:
            return self._exit_reasons.blamed_peer(*self.position)
        if isinstance(error, torch.OutOfMemoryError) or not (in_collective or nccl.is_collective_error(error)):
            return None
        return self.explain(first_line(error) + nccl.advice(str(error)))

    @contextmanager
    def reporting_peer_loss(self) -> Iterator[None]:
        """Raise an error of this block as `PeerLostError` if the loss of a peer has caused it."""
        try:
            yield
        except GangError:
            raise
        except RuntimeError as error:
            peer_loss = self.peer_loss(error)
            if peer_loss is None:
                raise
            raise peer_loss from error

    def publish_exit_reason(self, exit_reason: ExitReason) -> None:
        """Publish this rank's exit reason; the first one is never replaced."""
        if self._exit_reasons is not None:
            self._exit_reasons.publish(exit_reason)

    def close(self, reason: str = "", release_graphs: Callable[[], object] = lambda: None) -> None:
        """Leave the gang: peers that wait for this rank get an error at once, and can read `reason`, which is empty if
        all ranks have agreed to end. `release_graphs` releases the CUDA graphs that hold collectives.
        """
        if self._closed:
            return
        self._closed = True
        if self.heartbeat_monitor is not None:
            self.heartbeat_monitor.stop()
        if reason or self.heartbeat_monitor is not None:
            self.publish_exit_reason(ExitReason(self.rank if reason else None, reason))
        if self.world.size > 1 and dist.is_initialized():
            self._abort(release_graphs)

    def _abort(self, release_graphs: Callable[[], object]) -> None:
        """Abort the process groups. Unlike destroying them, this also releases a thread that waits in a collective."""
        axes = (self.world, self.attn, self.facts, self.attn_facts)
        nccl_groups = [axis.group for axis in axes[:2] if axis.group is not None and axis.direct]
        if nccl.abort(nccl_groups, release_graphs):
            dist.distributed_c10d._abort_process_group()
        else:  # torch's own abort would wait for the communicators, up to the timeout of the group
            logger.error("rank %d: NCCL does not end its communicators; the end of the process will", self.rank)
            nccl.abort([axis.group for axis in axes[2:] if axis.group is not None])
        for axis in axes:
            axis.leave()


def join(
    rank: int, world: int, attn_dp: int, rendezvous: Rendezvous, device: torch.device, store: Store | None
) -> Mesh:
    """Meet the other ranks; return the mesh once all have joined. Rank 0 passes the `store` that it opened.

    Raises:
        ConfigError: an environment variable switches torch's own supervision of NCCL on.
        PeerLostError: a rank did not join.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "0")
    if device.type == "cuda":
        nccl.disable_torch_supervision(os.environ)
    try:
        tcp = store.tcp if store is not None else _client(rendezvous)
        prefix = PrefixStore(f"epoch/{rendezvous.epoch}", tcp)
        if dist.is_initialized():
            dist.destroy_process_group()
        group_size = world // attn_dp
        groups = [list(range(g * group_size, (g + 1) * group_size)) for g in range(attn_dp)]
        with with_realtime_threads():
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
            facts, attn_facts = _axes(rank, world, groups, "gloo", ProgressClock())
        axes = (facts, attn_facts)
        if device.type == "cuda":
            axes = _axes(rank, world, groups, "nccl", facts.clock, device)
            nccl.warm_up(axes, device)
        tcp, wake_store = _client(rendezvous), _client(rendezvous)
    except RuntimeError as error:
        problem = first_line(error) + nccl.advice(str(error))
        raise PeerLostError(f"the ranks did not meet: {problem}", None, 0, "join") from error
    exit_reasons = ExitReasons(PrefixStore("exit_reasons", wake_store), rank, world)
    mesh = Mesh(rank, *axes, facts, attn_facts, rendezvous.epoch, (0, "join"), tcp, wake_store, exit_reasons)
    if device.type == "cuda":
        mesh.start_heartbeats(_client(rendezvous))
    return mesh


@contextmanager
def with_realtime_threads() -> Iterator[None]:
    """Give threads that are started in this block real-time priority, if the system allows it (CAP_SYS_NICE).

    gloo's threads hardly compute, but other ranks wait for the data that they carry. On a host with as many ranks as
    cores, gloo's threads would wait for the time slice of a computing thread to end: up to 4 ms, several times a step.
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


def _axes(
    rank: int,
    world: int,
    groups: list[list[int]],
    backend: str,
    clock: ProgressClock,
    device: torch.device | None = None,
) -> tuple[Axis, Axis]:
    """Return the axes of the world and of this rank's attention group. With a `device`, communicators are created now
    and not with the first collective.
    """
    direct = backend == "nccl"
    timer = EventTimer(device or torch.device("cuda")) if direct else HOST_TIMER
    options: dict[str, Any] = {"backend": backend, "timeout": COLLECTIVE_TIMEOUT, "device_id": device}
    world_axis = Axis(rank, world, dist.new_group(**options), direct, clock, timer)
    group_size = len(groups[0])
    if group_size == 1:
        return world_axis, Axis(clock=clock)
    # Torch requires that every rank creates all groups, in the same order, its own or not.
    group_handles = [dist.new_group(ranks, **options) for ranks in groups]
    return world_axis, Axis(rank % group_size, group_size, group_handles[rank // group_size], direct, clock, timer)
