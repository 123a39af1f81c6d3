"""The process of one rank on a simulated GPU. It runs the real engine in the real engine loop, and causes its own
faults.
"""

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
from tests.distributed.behind import run_on_simulated_device
from tests.distributed.process import serve, write_json_line
from tests.support.backend import force_backend

SLOW_S, SLOW_CALLS = 0.5, 6  # by how much a slow device delays a collective, and how many collectives it delays


class Fault:
    """The fault of the guilty rank. It happens in the target phase of the first step from `at_step` on that has one.

    `plant` names the fault; with an empty name there is none. `host_error_due` tells the host that it must raise the
    error of the fault "leaves".
    """

    def __init__(self, plant: str, at_step: int) -> None:
        self._plant, self._at_step, self.host_error_due = plant, at_step, False
        self._triggered, self._remaining_slow_calls = False, SLOW_CALLS if plant == "slow" else 0

    def __call__(self, step: int, call: ScriptCall) -> None:
        """Cause the fault if it is due. The device calls this before each collective."""
        if not self._plant or step < self._at_step or (call.phase != "target" and not self._triggered):
            return
        if self._remaining_slow_calls:
            self._remaining_slow_calls -= 1
            time.sleep(SLOW_S)
        if self._triggered:
            return
        self._triggered = True
        write_json_line({"struck": [time.monotonic(), step]})
        if self._plant == "process stands still":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._plant == "device stands still":
            threading.Event().wait()
        elif self._plant == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._plant in ("leaves", "aborts"):
            self.host_error_due = True
            if self._plant == "aborts":
                raise ValueError("a fault of this device alone")
            threading.Event().wait()


def run(case: dict[str, Any], rank: int, rendezvous: Rendezvous, store: Store | None) -> None:
    """Run a case as one rank; write the tokens of each output, and at the end how the run ended."""
    force_backend()
    config = EngineConfig.from_kwargs(case["config"])
    engine: Any = build_rank(config, rank, rendezvous, store)
    is_guilty_rank, plant = rank == case["guilty"], case["plant"]
    fault = Fault(plant if is_guilty_rank else "", case["at_step"])
    run_on_simulated_device(
        engine,
        rendezvous,
        config.watchdog_timeout_s,
        fault if is_guilty_rank else lambda step, call: None,
        plant == "aborts",
    )
    if plant == "leaves" and is_guilty_rank:
        original_wait = engine.lockstep.watchdog.wait

        def wait(moment: Any) -> None:
            while not fault.host_error_due and not moment.reached:
                time.sleep(0.001)
            if fault.host_error_due:
                raise ValueError("a bug of this rank alone")
            original_wait(moment)

        engine.lockstep.watchdog.wait = wait
    loop = EngineLoop(engine, rank, config.tp_size)
    loop.start()
    loop.put(
        Commands(submits=tuple(request_from_action(action) for action in case["actions"] if action["dp_rank"] == rank))
    )
    healthy, unfinished_requests = plant in ("", "slow"), sum(action["dp_rank"] == rank for action in case["actions"])
    while not loop.has_ended:
        for item in loop.drain(0.05):
            for output in item.outputs:
                write_json_line({"tokens": [output.request_id, list(output.token_ids)]})
                unfinished_requests -= output.finish_reason is not None
        if healthy and rank == 0 and not unfinished_requests and engine.is_idle:
            loop.stop()
    failed_at, failure = time.monotonic(), loop.failure
    if failure is None:
        engine.close()
        write_json_line({"ended": unfinished_requests})
        return
    named_fields = {"kind": failure.kind, "rank": failure.rank, "step": failure.step, "phase": failure.phase}
    write_json_line({"error": failure.reason, **named_fields, "at": failed_at})


def request_from_action(action: dict[str, Any]) -> Request:
    fields = action["request"]
    return Request(fields["request_id"], tuple(fields["prompt_token_ids"]), RequestParams(**fields["params"]))


if __name__ == "__main__":
    # The first tape imports torch's compiler, which takes longer than the limit of the watchdog.
    Tape(lambda: torch.zeros(1) + 1)
    serve(int(sys.argv[1]), run)
