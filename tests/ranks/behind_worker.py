"""The process of a rank on a simulated GPU: the real engine in its real loop; faults come from within."""

import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from cluster.actors.engine_loop import EngineLoop
from cluster.actors.messages import Commands
from cluster.capture.tape import Tape
from cluster.config import EngineConfig
from cluster.distributed.mesh import Rendezvous, Store
from cluster.dp_attention.plan import ScriptCall
from cluster.engine import build_rank
from cluster.request import Request, RequestParams
from tests.backend import force
from tests.ranks.behind import put_behind
from tests.ranks.process import say, serve

SLOW_S, SLOW_CALLS = 0.5, 6  # how much later a slow device comes to a collective, and to how many


class Fault:
    """What goes wrong on the guilty rank, amid the target phase of a step from `at_step` on."""

    def __init__(self, plant: str, at_step: int) -> None:
        self._plant, self._at_step, self.due = plant, at_step, False
        self._struck, self._slow = False, SLOW_CALLS if plant == "slow" else 0

    def __call__(self, step: int, call: ScriptCall) -> None:
        """Before a collective, on the device."""
        if not self._plant or step < self._at_step or (call.phase != "target" and not self._struck):
            return
        if self._slow:
            self._slow -= 1
            time.sleep(SLOW_S)
        if self._struck:
            return
        self._struck = True
        say({"struck": [time.monotonic(), step]})
        if self._plant == "process stands still":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._plant == "device stands still":
            threading.Event().wait()
        elif self._plant == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._plant in ("leaves", "aborts"):
            self.due = True
            if self._plant == "aborts":
                raise ValueError("a fault of this device alone")
            threading.Event().wait()


def run(case: dict[str, Any], rank: int, where: Rendezvous, store: Store | None) -> None:
    force()
    config = EngineConfig.from_kwargs(case["config"])
    engine: Any = build_rank(config, rank, where, store)
    guilty, plant = rank == case["guilty"], case["plant"]
    fault = Fault(plant if guilty else "", case["at_step"])
    put_behind(
        engine, where, config.watchdog_timeout_s, fault if guilty else lambda step, call: None, plant == "aborts"
    )
    if plant == "leaves" and guilty:
        true = engine.lockstep.watchdog.wait

        def wait(moment: Any) -> None:
            while not fault.due and not moment.reached:
                time.sleep(0.001)
            if fault.due:
                raise ValueError("a bug of this rank alone")
            true(moment)

        engine.lockstep.watchdog.wait = wait
    loop = EngineLoop(engine, rank, config.tp_size)
    loop.start()
    loop.put(Commands(submits=tuple(asked(action) for action in case["actions"] if action["dp_rank"] == rank)))
    healthy, left = plant in ("", "slow"), sum(action["dp_rank"] == rank for action in case["actions"])
    while not loop.has_ended:
        for item in loop.drain(0.05):
            for output in item.outputs:
                say({"tokens": [output.request_id, list(output.token_ids)]})
                left -= output.finish_reason is not None
        if healthy and rank == 0 and not left and engine.is_idle:
            loop.stop()
    at, failure = time.monotonic(), loop.failure
    if failure is None:
        engine.close()
        say({"ended": left})
        return
    said = {"kind": failure.kind, "rank": failure.rank, "step": failure.step, "phase": failure.phase}
    say({"error": failure.reason, **said, "at": at})


def asked(action: dict[str, Any]) -> Request:
    fields = action["request"]
    return Request(fields["request_id"], tuple(fields["prompt_token_ids"]), RequestParams(**fields["params"]))


if __name__ == "__main__":
    Tape(lambda: torch.zeros(1) + 1)  # a first tape imports torch's compiler, which takes longer than the limit
    serve(int(sys.argv[1]), run)
