"""What `cluster.distributed.mesh` is to real engines, over plain sockets: the ranks of a fake gang meet, exchange a row
per step, sleep and ring. A peer that goes away is an error at once; one that is silent is waited for, as with gloo.
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
    """Lines of JSON over a socket."""

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

    def cut(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


class Link:
    """One rank's place in a gang. Rank 0 is the hub: it hears every row and answers each peer with all of them."""

    def __init__(self, rank: int, world: int, rendezvous: Rendezvous, store: Store | None) -> None:
        self.rank, self.world = rank, world
        self._rung, self._lost = -1, ""
        self._bell = threading.Condition()
        self._rows: dict[int, Wire] = {}
        self._bells: dict[int, Wire] = {}
        if store is not None:
            while len(self._rows) + len(self._bells) < 2 * (world - 1):
                wire = Wire(store.listener.accept()[0])
                hello = wire.receive()
                assert hello["epoch"] == rendezvous.epoch, "a rank of an older life"
                (self._bells if hello["bell"] else self._rows)[hello["rank"]] = wire
            store.listener.close()
        else:
            for wires, bell in ((self._rows, False), (self._bells, True)):
                wire = wires[0] = Wire(socket.create_connection(rendezvous[:2]))
                wire.send({"rank": rank, "epoch": rendezvous.epoch, "bell": bell})
        for peer in self._bells:
            threading.Thread(target=self._hear, args=(peer,), daemon=True).start()

    def exchange(self, row: dict[str, Any], step: int, phase: str) -> list[dict[str, Any]]:
        """Everybody's rows in rank order."""
        if self.rank:
            try:
                self._rows[0].send(row)
                answer = self._rows[0].receive()
            except OSError as error:
                raise PeerLostError("rank 0 is gone", 0, step, phase) from error
            if "lost" in answer:
                raise PeerLostError(f"rank {answer['lost']} is gone", answer["lost"], step, phase)
            rows: list[dict[str, Any]] = answer["rows"]
            return rows
        rows = [row]
        for peer in range(1, self.world):
            try:
                rows.append(self._rows[peer].receive())
            except OSError as error:
                self._tell({"lost": peer})
                raise PeerLostError(f"rank {peer} is gone", peer, step, phase) from error
        self._tell({"rows": rows})
        return rows

    def _tell(self, answer: dict[str, Any]) -> None:
        for wire in self._rows.values():
            try:
                wire.send(answer)
            except OSError:
                continue

    def sleep(self, step: int, timeout_s: float | None = None) -> None:
        with self._bell:
            self._bell.wait_for(lambda: self._rung >= step or bool(self._lost), timeout_s)

    def ring(self, step: int) -> None:
        self._ring(step)
        self._pass_on({"ring": step})

    def _ring(self, step: int) -> None:
        with self._bell:
            self._rung = max(self._rung, step)
            self._bell.notify_all()

    def _pass_on(self, word: dict[str, Any]) -> None:
        for wire in self._bells.values():
            try:
                wire.send(word)
            except OSError:
                continue

    def _hear(self, peer: int) -> None:
        try:
            while True:
                word = self._bells[peer].receive()
                if "ring" in word:
                    self._ring(word["ring"])
                if self.rank == 0:
                    self._pass_on(word)
        except OSError:
            with self._bell:
                self._lost = f"rank {peer} is gone"
                self._bell.notify_all()
            if self.rank == 0:
                self._pass_on({"lost": peer})
                for wire in self._bells.values():
                    wire.cut()

    def close(self) -> None:
        for wire in (*self._rows.values(), *self._bells.values()):
            wire.cut()
