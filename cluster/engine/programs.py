"""Runs steps. A step runs eagerly, or, if its plan allows it, by replaying the captured program of its key.

A captured program is a set of CUDA graphs on a GPU, and a tape (a list of recorded calls) on a CPU. It reads its inputs
from fixed memory and makes no decision on the host, so all steps with one key share it. The key (`ProgramKey`) holds
all that decides what runs, such as the sizes of all groups, the shape of the trees and the sampling mode. A step is
captured when its key occurs for the second time, because the first run allocates buffers that are made once and kept
(`cluster/capture/tape.py` describes a capture). Before each replay the host makes the calls in
`recorder.CallsBeforeReplay`, which prepare the step and say whether the program still fits. If one returns False, the
step runs eagerly.
"""

import logging
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from cluster.batch import ExtendMode, SamplingMode, StepInput
from cluster.capture.recorder import CallsBeforeReplay, Captured, replayable
from cluster.config.tree_shape import TreeShape
from cluster.device.staging import StagedLists
from cluster.device.timing import timer_of
from cluster.distributed.progress import ProgressClock
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ScriptCall, StepPlan
from cluster.dp_attention.sizes import ProgramKey
from cluster.engine.assembler import Assembler
from cluster.spec.result import PhaseTimes, StepOutput
from cluster.spec.step import Step

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], StepOutput]], Captured[StepOutput]]
GRAPHS, TAPES = 16, 128
"""How many programs are kept, besides those captured at start: this many for each buffer set (FlashInfer has two, other
kernels one). If there are more, the least recently used program is dropped. Keys that have occurred only once are
remembered, up to the same number. Graphs hold memory of their own on the GPU, so few are kept. Tapes share most of
their memory (each adds some 0.7 MB for the demo pair). Many are kept, because a batch that shrinks by one request at a
time needs a tape for each size, and with adaptive trees two or three tapes.
"""
MAX_PRICES = 15
"""The price of a capture is the median of the last captures, at most so many."""
EAGER_FALLBACK_WARNING = (
    "a captured step ran eagerly, as its plan is unlike the one that it was captured with. Its tokens are right. "
    "/metrics counts such steps in aerie_launched_anew_total; if there are many, set capture to off"
)


@dataclass(slots=True)
class Program:
    """A captured step: the numbers that it reads (`inputs`), the host's calls before each replay (`host_calls`), its
    exchange calls (`calls`), and the number of collectives that they make (`collectives`). `checksum` is a checksum of
    the program's key. `capture_us` is the time of the two steps before its first replay, in microseconds: the first run
    of the key and the capture. After this replay it is 0.
    """

    inputs: StagedLists
    host_calls: CallsBeforeReplay
    captured: Captured[StepOutput]
    calls: tuple[ScriptCall, ...]
    collectives: int
    checksum: int
    capture_us: float = 0.0


@dataclass(slots=True)
class FirstRun:
    """The first run of a key: the calls that the host must make before each later run, and the time that it took, in
    microseconds.
    """

    host_calls: CallsBeforeReplay
    us: float = 0.0


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
        device = step.draft_inputs.bonus.device
        self._timer, self._max_programs = timer_of(device), TAPES if device.type == "cpu" else GRAPHS
        self._pinned: dict[ProgramKey, Program] = {}
        self._evictable: OrderedDict[ProgramKey, Program] = OrderedDict()
        self._first_runs: OrderedDict[ProgramKey, FirstRun] = OrderedDict()
        self.checksum = 0
        """The sum of the key checksums: equal on ranks with the same programs, in whatever order they were captured."""
        self.capture_us = 0
        """What a program costs, in microseconds: by how much the first run of its key and the step in which it is
        captured take longer than two replays. This is the median of the last captures. It is 0 before the first replay
        of a program.
        """
        self._prices = deque[float](maxlen=MAX_PRICES)
        self.eager_fallbacks = 0
        """The number of steps that ran eagerly because a call of `CallsBeforeReplay` before capture or replay returned
        False.
        """

    @property
    def captured(self) -> dict[ProgramKey, Program]:
        """The captured programs by key."""
        return {**self._pinned, **self._evictable}

    def has_program(self, key: ProgramKey) -> bool:
        """Whether a program is captured for `key`. Callers pass `StepPlan.key`, which always has buffer set 0, so
        programs of other buffer sets are not looked up.
        """
        return key in self._pinned or key in self._evictable

    def price_us(self, plan: StepPlan, tier: int) -> int:
        """Return `capture_us` if steps with the sizes and the mode of `plan` are captured, and there is no program yet
        for such a step with `tier`. Otherwise return 0.
        """
        if not plan.captured:
            return 0
        key = plan.key._replace(tier=tier, forced_nodes=0)
        modes = ExtendMode.ACCEPTED, ExtendMode.NOTHING
        return 0 if any(self.has_program(key._replace(extend_mode=mode)) for mode in modes) else self.capture_us

    def pin_all(self) -> None:
        """Exempt all programs captured so far from being dropped for later programs."""
        self._pinned.update(self._evictable)
        self._evictable.clear()

    def remove(self, key: ProgramKey) -> None:
        """Drop the program of a key."""
        program = self._evictable.pop(key, None) or self._pinned.pop(key)
        self.checksum -= program.checksum

    def remove_all(self) -> None:
        """Drop all programs, because a communicator can end only when no graph holds its collectives."""
        for key in self.captured:
            self.remove(key)

    def add(self, key: ProgramKey, program: Program) -> None:
        """Add a captured program. If there are too many, drop the least recently used one."""
        self._evictable[key] = program
        self.checksum += program.checksum
        if len(self._evictable) > self._max_programs * self.assembler.buffer_sets:
            self.remove(next(iter(self._evictable)))

    def run(self, step_input: StepInput, plan: StepPlan, shape: TreeShape) -> StepOutput:
        """Begin a step of this plan. `step_input` has the plan's padding, `shape` is the shape of its trees. The copy
        of the results to the host is queued: `StepOutput.read` waits for it.

        Raises:
            OutOfStepError: a captured program would make other calls of the exchange than the plan's script.
        """
        return self._start(self.assembler.send(step_input, shape.forced_nodes), plan, shape).start_copy()

    def _start(self, inputs: StagedLists, plan: StepPlan, shape: TreeShape) -> StepOutput:
        if self._capture is None or not plan.captured:
            return self._run(inputs, plan.key, shape)
        # A program uses one buffer set, so each buffer set has its own programs.
        key = plan.key._replace(buffer_set=self.assembler.buffer_set)
        if key in self._evictable:
            self._evictable.move_to_end(key)
        program = self._pinned.get(key) or self._evictable.get(key)
        if program is not None:
            fits = self._fits(program.host_calls)
            return self._replay(program, inputs) if fits else self._run(inputs, key, shape)
        first_run = self._first_runs.pop(key, None)
        if first_run is not None and self._fits(first_run.host_calls):  # the key occurs for the second time
            return self._capture_step(self._capture, key, inputs, first_run, shape)
        # The first run of a key adds to `host_calls` the calls that the host must make before each later run.
        self._first_runs[key] = first_run = FirstRun(CallsBeforeReplay())
        if len(self._first_runs) > self._max_programs * self.assembler.buffer_sets:
            self._first_runs.popitem(last=False)
        started = time.perf_counter()
        with replayable(first_run.host_calls):
            output = self._run(inputs, key, shape)
        first_run.us = 1e6 * (time.perf_counter() - started)
        return output

    def _fits(self, host_calls: CallsBeforeReplay) -> bool:
        """Make the host's calls before a capture or replay. Return whether the program fits this step."""
        ready = host_calls.ready()
        if not ready:
            if not self.eager_fallbacks:
                logger.warning(EAGER_FALLBACK_WARNING)
            self.eager_fallbacks += 1
        return ready

    def _run(self, inputs: StagedLists, key: ProgramKey, shape: TreeShape) -> StepOutput:
        mode, extend_mode = SamplingMode(key.mode), ExtendMode(key.extend_mode)
        return self.step.run(self.assembler.batch(inputs, mode, shape.forced_nodes, extend_mode), shape)

    def _capture_step(
        self, capture: Capture, key: ProgramKey, inputs: StagedLists, first_run: FirstRun, shape: TreeShape
    ) -> StepOutput:
        # The program reads its inputs from this copy; each replay first copies the new inputs into it.
        own_inputs = replace(inputs, integers=inputs.integers.clone())
        calls, calls_before = self._exchange.remaining_calls, self._clock.collectives_returned
        started = time.perf_counter()
        with replayable(first_run.host_calls):
            captured = capture(lambda: self._run(own_inputs, key, shape))
        capture_us, checksum = first_run.us + 1e6 * (time.perf_counter() - started), zlib.crc32(repr(key).encode())
        collectives = self._clock.collectives_returned - calls_before
        self.add(key, Program(own_inputs, first_run.host_calls, captured, calls, collectives, checksum, capture_us))
        return captured.output.clone()  # a copy, because the next replay overwrites the output

    def _replay(self, program: Program, inputs: StagedLists) -> StepOutput:
        self._exchange.replay(program.calls)
        started, calls_before = self._timer.now(), self._clock.collectives_returned
        host_started = time.perf_counter()
        self.step.enter_phase("replay")
        program.inputs.integers.copy_(inputs.integers)
        program.captured.replay()
        if program.capture_us:
            self._prices.append(max(1.0, program.capture_us - 2e6 * (time.perf_counter() - host_started)))
            self.capture_us, program.capture_us = round(median(self._prices)), 0.0
        # A graph queues all its collectives at once, so count them here. A tape has counted its own: this adds 0.
        self._clock.count_replayed(calls_before + program.collectives - self._clock.collectives_returned)
        output = program.captured.output.clone()
        output.phases = PhaseTimes(self._timer, [started, self._timer.now()], ("replay",))
        return output
