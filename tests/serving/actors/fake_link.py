"""A fake of `cluster.distributed.mesh` over plain sockets, for the ranks of a gang of counting engines.

The ranks connect, exchange rows in each step, sleep while they are idle, and wake each other. A peer that disconnects
is an error at once. A peer that is silent is no error: the others wait for it, as with gloo.
"""

import json
import socket
import threading
from typing import Any, NamedTuple


class GangError(RuntimeError):
    def __init__(self, message: str, rank: int | None, step: int, phase: str) -> None:
        super().__init__(message)
        self.rank, self.step, self.phase = rank, step, phase


class PeerLostError(GangError):
    pass


class OutOfStepError(GangError):
    pass


class Rendezvous(NamedTuple):
    host: str
    port: int
    epoch: int = 0


class Store:
    def __init__(self, host: str) -> None:
        self.listener = socket.create_server((host, 0))
        self.port: int = self.listener.getsockname()[1]


class Wire:
    """A socket that sends and receives JSON objects, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._reader = connection.makefile("r")
        self._lock = threading.Lock()

    def send(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.connection.sendall(json.dumps(row).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self._reader.readline()
        if not line:
            raise ConnectionError("closed")
        row: dict[str, Any] = json.loads(line)
        return row

    def shut_down(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class Link:
    """One rank's connections to its gang. Rank 0 is the hub: it receives every peer's row and sends all rows to each.

    A peer has two connections to the hub: one for rows, and one for the messages that wake sleeping ranks.
    """

    def __init__(self, rank: int, world: int, rendezvous: Rendezvous, store: Store | None) -> None:
        self.rank, self.world = rank, world
        self._woken_step, self._lost_peer = -1, ""
        self._wakeup = threading.Condition()
        self._row_wires: dict[int, Wire] = {}
        self._wake_wires: dict[int, Wire] = {}
        if store is not None:
            while len(self._row_wires) + len(self._wake_wires) < 2 * (world - 1):
                wire = Wire(store.listener.accept()[0])
                hello = wire.receive()
                assert hello["epoch"] == rendezvous.epoch, "a rank of an older incarnation connected"
                (self._wake_wires if hello["bell"] else self._row_wires)[hello["rank"]] = wire
            store.listener.close()
        else:
            for wires, is_wake_wire in ((self._row_wires, False), (self._wake_wires, True)):
                wire = wires[0] = Wire(socket.create_connection(rendezvous[:2]))
                wire.send({"rank": rank, "epoch": rendezvous.epoch, "bell": is_wake_wire})
        for peer in self._wake_wires:
            threading.Thread(target=self._receive_wakeups, args=(peer,), daemon=True).start()

    def exchange(self, row: dict[str, Any], step: int, phase: str) -> list[dict[str, Any]]:
        """Send this rank's row, and return the rows of all ranks in rank order."""
        if self.rank:
            try:
                self._row_wires[0].send(row)
                answer = self._row_wires[0].receive()
            except OSError as error:
                raise PeerLostError("rank 0 is gone", 0, step, phase) from error
            if "lost" in answer:
                raise PeerLostError(f"rank {answer['lost']} is gone", answer["lost"], step, phase)
            rows: list[dict[str, Any]] = answer["rows"]
            return rows
        rows = [row]
        for peer in range(1, self.world):
            try:
                rows.append(self._row_wires[peer].receive())
            except OSError as error:
                self._send_to_peers({"lost": peer})
                raise PeerLostError(f"rank {peer} is gone", peer, step, phase) from error
        self._send_to_peers({"rows": rows})
        return rows

    def _send_to_peers(self, answer: dict[str, Any]) -> None:
        for wire in self._row_wires.values():
            try:
                wire.send(answer)
            except OSError:
                continue

    def sleep(self, step: int, timeout_s: float | None = None) -> None:
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._woken_step >= step or bool(self._lost_peer), timeout_s)

    def wake_ranks(self, step: int) -> None:
        self._record_wakeup(step)
        self._forward_wakeup({"ring": step})

    def _record_wakeup(self, step: int) -> None:
        with self._wakeup:
            self._woken_step = max(self._woken_step, step)
            self._wakeup.notify_all()

    def _forward_wakeup(self, message: dict[str, Any]) -> None:
        for wire in self._wake_wires.values():
            try:
                wire.send(message)
            except OSError:
                continue

    def _receive_wakeups(self, peer: int) -> None:
        try:
            while True:
                message = self._wake_wires[peer].receive()
                if "ring" in message:
                    self._record_wakeup(message["ring"])
                if self.rank == 0:
                    self._forward_wakeup(message)
        except OSError:
            with self._wakeup:
                self._lost_peer = f"rank {peer} is gone"
                self._wakeup.notify_all()
            if self.rank == 0:
                self._forward_wakeup({"lost": peer})
                for wire in self._wake_wires.values():
                    wire.shut_down()

    def close(self) -> None:
        for wire in (*self._row_wires.values(), *self._wake_wires.values()):
            wire.shut_down()
