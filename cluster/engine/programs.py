"""Runs steps: eagerly, or by replaying the captured program of their key where the plan says so.

A captured program reads its inputs from fixed memory and makes no decision on the host, so all steps of one key (sizes
of all groups, tier, mode, buffer set) share it. A step is captured when its key occurs for the second time: the first
run allocates buffers that are made once and kept (`cluster/capture/tape.py` describes a capture). Before each replay
the host makes the calls in `recorder.Ahead`, which prepare the step and say whether the program still fits. If one
returns False, the step runs eagerly.
"""

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.batch import SamplingMode, StepInput
from cluster.capture.recorder import Ahead, Captured, repeated
from cluster.config.tree_shape import TreeShape
from cluster.device.staging import Sent
from cluster.device.timing import timer_of
from cluster.distributed.progress import ProgressClock
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ProgramKey, ScriptCall, StepPlan
from cluster.engine.assembler import Assembler
from cluster.spec.result import PhaseTimes, StepOutput
from cluster.spec.step import Step

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], StepOutput]], Captured[StepOutput]]
GRAPHS, TAPES = 16, 64
"""The number of programs kept for each turn (buffer set) besides those captured at start. The least recently used
program is dropped. The same number of keys that occurred once is remembered. Graphs hold memory of their own on the
GPU, so few are kept. Tapes share their memory, and a batch that shrinks by one request at a time needs a tape for each
size.
"""
UNLIKE = (
    "a captured step was launched anew, as its plan is unlike the one that it was captured with. Its tokens are right. "
    "/metrics counts such steps in aerie_launched_anew_total; if there are many, set capture to off"
)


@dataclass(frozen=True, slots=True)
class Program:
    """A captured step: the numbers that it reads (`sent`), the host's calls before each replay (`ahead`), its exchange
    calls, and the number of collectives in them (`entered`). `number` is a checksum of its key.
    """

    sent: Sent
    ahead: Ahead
    captured: Captured[StepOutput]
    calls: tuple[ScriptCall, ...]
    entered: int
    number: int


class Programs:
    """One rank's step and its captured programs. Plans decide what is captured, so all ranks have the same keys."""

    def __init__(
        self, assembler: Assembler, step: Step, exchange: Exchange, clock: ProgressClock, capture: Capture | None
    ) -> None:
        """`capture` runs a program once and captures it. If it is None, nothing is captured, and no plan has `captured`
        set. `clock` counts the collectives.
        """
        self.assembler, self.step = assembler, step
        self._exchange, self._clock, self._capture = exchange, clock, capture
        device = step.carried.bonus.device
        self._timer, self._kept = timer_of(device), TAPES if device.type == "cpu" else GRAPHS
        self._started: dict[ProgramKey, Program] = {}
        self._later: OrderedDict[ProgramKey, Program] = OrderedDict()
        self._once: OrderedDict[ProgramKey, Ahead] = OrderedDict()
        self.checksum = 0
        """The sum of the key checksums: equal on ranks with the same programs, in whatever order they were captured."""
        self.launched_anew = 0
        """The number of steps that ran eagerly because a call of `Ahead` before capture or replay returned False."""

    @property
    def captured(self) -> dict[ProgramKey, Program]:
        """The captured programs by key."""
        return {**self._started, **self._later}

    def keep(self) -> None:
        """Exempt all programs captured so far from being dropped for later programs."""
        self._started.update(self._later)
        self._later.clear()

    def forget(self, key: ProgramKey) -> None:
        """Drop a program."""
        program = self._later.pop(key, None) or self._started.pop(key)
        self.checksum -= program.number

    def drop(self) -> None:
        """Drop all programs. A communicator can end only when no graph holds its collectives."""
        for key in self.captured:
            self.forget(key)

    def add(self, key: ProgramKey, program: Program) -> None:
        """Add a captured program. If there are too many, drop the least recently used one."""
        self._later[key] = program
        self.checksum += program.number
        if len(self._later) > self._kept * self.assembler.turns:
            self.forget(next(iter(self._later)))

    def run(self, order: StepInput, plan: StepPlan, shape: TreeShape) -> StepOutput:
        """Begin a step of this plan. `order` is padded to the plan, `shape` is the tree of its tier. The results are
        being copied to the host: `read` waits for them.

        Raises:
            OutOfStepError: a captured program would make other calls of the exchange than the plan's script.
        """
        return self._begun(self.assembler.send(order, shape.forced), plan, shape).start_copy()

    def _begun(self, sent: Sent, plan: StepPlan, shape: TreeShape) -> StepOutput:
        if self._capture is None or not plan.captured:
            return self._run(sent, plan.mode, shape)
        key = plan.key._replace(turn=self.assembler.turn)  # a program uses one buffer set, so each turn has its own
        if key in self._later:
            self._later.move_to_end(key)
        program = self._started.get(key) or self._later.get(key)
        if program is not None:
            ready = self._ready(program.ahead)
            return self._replayed(program, sent) if ready else self._run(sent, plan.mode, shape)
        ahead = self._once.pop(key, None)  # not None if the key has occurred once before: now capture the step
        if ahead is not None and self._ready(ahead):
            return self._captured(self._capture, key, sent, ahead, shape)
        self._once[key] = ahead = Ahead()  # collects the host's calls that must come before each later run
        if len(self._once) > self._kept * self.assembler.turns:
            self._once.popitem(last=False)
        with repeated(ahead):
            return self._run(sent, plan.mode, shape)

    def _ready(self, ahead: Ahead) -> bool:
        """Make the host's calls before a capture or replay. Return whether the program fits this step."""
        ready = ahead.ready()
        if not ready:
            if not self.launched_anew:
                logger.warning(UNLIKE)
            self.launched_anew += 1
        return ready

    def _run(self, sent: Sent, mode: SamplingMode, shape: TreeShape) -> StepOutput:
        return self.step.run(self.assembler.batch(sent, mode, shape.forced), shape)

    def _captured(self, capture: Capture, key: ProgramKey, sent: Sent, ahead: Ahead, shape: TreeShape) -> StepOutput:
        # The program reads its inputs from this copy; each replay first copies the new inputs into it.
        own, mode = replace(sent, words=sent.words.clone()), SamplingMode(key.mode)
        calls, before = self._exchange.rest, self._clock.calls
        with repeated(ahead):
            captured = capture(lambda: self._run(own, mode, shape))
        number = zlib.crc32(repr(key).encode())
        self.add(key, Program(own, ahead, captured, calls, self._clock.calls - before, number))
        return captured.output.kept()  # a copy, because the next replay overwrites the output

    def _replayed(self, program: Program, sent: Sent) -> StepOutput:
        self._exchange.replay(program.calls)
        began, before = self._timer.now(), self._clock.calls
        self.step.enter("replay")
        program.sent.words.copy_(sent.words)
        program.captured.replay()
        # Count the collectives of a graph, which are queued at once. A tape counts its own, so the difference is 0.
        self._clock.replayed(before + program.entered - self._clock.calls)
        output = program.captured.output.kept()
        output.phases = PhaseTimes(self._timer, [began, self._timer.now()], ("replay",))
        return output
