"""Runs steps: as they are, or by replaying the program of their key where the plan says so.

A step's program reads its inputs where they lay when it was captured, and decides nothing on the host, so steps of one
key (sizes of all groups, tier, mode) share one program. It is captured the second time that its key occurs: the first
run makes what is made once and kept. `cluster/tape.py` says what a capture is.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.batch import Order
from cluster.clock import Clock
from cluster.config import TreeShape
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import Call, Key, StepPlan
from cluster.engine.assembler import Assembler, Inputs
from cluster.spec.result import Phases, StepOutput
from cluster.spec.step import Step
from cluster.tape import Captured
from cluster.timing import timer_of

Capture = Callable[[Callable[[], StepOutput]], Captured[StepOutput]]
KEPT = 16  # programs besides those captured at start; the one that was not used for longest makes room


@dataclass(frozen=True, slots=True)
class Program:
    """A captured step: the inputs that it reads, its calls of the exchange, and the collectives that these enter."""

    inputs: Inputs
    captured: Captured[StepOutput]
    calls: tuple[Call, ...]
    entered: int


class Programs:
    """One rank's step, and the programs captured of it so far: the same keys on every rank, as plans decide them."""

    def __init__(
        self,
        assembler: Assembler,
        step: Step,
        exchange: Exchange,
        clock: Clock,
        capture: Capture | None,
        kept: int = KEPT,
    ) -> None:
        """`capture` runs and captures a program; None: nothing is captured, and no plan says so. `clock` counts the
        collectives.
        """
        self.assembler, self.step = assembler, step
        self._exchange, self._clock, self._capture, self._kept = exchange, clock, capture, kept
        self._timer = timer_of(step.carried.bonus.device)
        self._programs: OrderedDict[Key, Program | None] = OrderedDict()

    @property
    def captured(self) -> dict[Key, Program]:
        """The captured programs by key."""
        return {key: program for key, program in self._programs.items() if program is not None}

    @property
    def checksum(self) -> int:
        """One number for the keys that are captured, whatever their order."""
        return sum(zlib.crc32(repr(key).encode()) for key in self.captured)

    def run(self, order: Order, plan: StepPlan, shape: TreeShape) -> StepOutput:
        """Run a step of this plan; `order` is padded to it, `shape` are the trees of its tier.

        Raises:
            OutOfStepError: a captured program would make other calls of the exchange than the plan's script has.
        """
        inputs = self.assembler.send(order)
        if self._capture is None or not plan.captured:
            return self._run(inputs, shape)
        known, program = plan.key in self._programs, self._programs.get(plan.key)
        if program is not None:
            self._programs.move_to_end(plan.key)
            return self._replayed(program, inputs)
        if known:
            return self._captured(self._capture, plan.key, inputs, shape)
        self._programs[plan.key] = None
        if len(self._programs) > self._kept:
            self._programs.popitem(last=False)
        return self._run(inputs, shape)

    def _run(self, inputs: Inputs, shape: TreeShape) -> StepOutput:
        return self.step.run(self.assembler.batch(inputs), shape)

    def _captured(self, capture: Capture, key: Key, inputs: Inputs, shape: TreeShape) -> StepOutput:
        own = replace(inputs, sent=replace(inputs.sent, words=inputs.sent.words.clone()))
        calls, before = self._exchange.rest, self._clock.calls
        captured = capture(lambda: self._run(own, shape))
        self._programs[key] = Program(own, captured, calls, self._clock.calls - before)
        self._programs.move_to_end(key)
        return captured.output.kept()

    def _replayed(self, program: Program, inputs: Inputs) -> StepOutput:
        self._exchange.replay(program.calls)
        began, before = self._timer.now(), self._clock.calls
        self.step.enter("replay")
        program.inputs.sent.words.copy_(inputs.sent.words)
        program.captured.replay()
        self._clock.replayed(before + program.entered - self._clock.calls)
        phases = Phases(self._timer, [began, self._timer.now()], ("replay",))
        return replace(program.captured.output.kept(), phases=phases)
