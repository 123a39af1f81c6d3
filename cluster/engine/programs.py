"""Runs steps: as they are, or by replaying the program of their shape where it has been captured.

A step's program reads its inputs where they lay when it was captured, and decides nothing on the host, so orders of one
shape (requests, prompt rows, tier, mode) share one program. It is captured the second time that its shape occurs: the
first run makes what is made once and kept. `cluster/tape.py` says what a capture is.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.batch import Order
from cluster.config import TreeShape
from cluster.engine.assembler import Assembler, Inputs
from cluster.spec.result import Phases, StepOutput
from cluster.spec.step import Step
from cluster.tape import Captured
from cluster.timing import timer_of

Key = tuple[int, ...]
Capture = Callable[[Callable[[], StepOutput]], Captured[StepOutput]]
KEPT = 16  # programs; the one that was not used for longest makes room
MOST_ROWS = 1024  # of the target; a program's buffers grow with its rows, and what it saves does not


@dataclass(frozen=True, slots=True)
class Program:
    """A captured step and the inputs that it reads."""

    inputs: Inputs
    captured: Captured[StepOutput]


class Programs:
    """One rank's step, and the programs captured of it so far."""

    def __init__(self, assembler: Assembler, step: Step, capture: Capture | None) -> None:
        """`capture` runs and captures a program; None: nothing is captured."""
        self.assembler, self.step, self._capture = assembler, step, capture
        self._timer = timer_of(step.carried.bonus.device)
        self._programs: OrderedDict[Key, Program | None] = OrderedDict()

    @property
    def captured(self) -> list[Program]:
        """The captured programs."""
        return [program for program in self._programs.values() if program is not None]

    def run(self, order: Order, shape: TreeShape) -> StepOutput:
        """Run a step of this order with trees of this shape."""
        inputs = self.assembler.send(order)
        rows = inputs.decodes * shape.num_draft_tokens + inputs.prompt_rows
        if self._capture is None or rows > MOST_ROWS:
            return self._run(inputs, shape)
        key = shape.num_steps, *inputs.shape
        if key not in self._programs:
            self._note(key, None)
            return self._run(inputs, shape)
        self._programs.move_to_end(key)
        program = self._programs[key]
        if program is not None:
            return self._replayed(program, inputs)
        own = replace(inputs, sent=replace(inputs.sent, words=inputs.sent.words.clone()))
        captured = self._capture(lambda: self._run(own, shape))
        self._programs[key] = Program(own, captured)
        return captured.output.kept()

    def _run(self, inputs: Inputs, shape: TreeShape) -> StepOutput:
        return self.step.run(self.assembler.batch(inputs), shape)

    def _replayed(self, program: Program, inputs: Inputs) -> StepOutput:
        began = self._timer.now()
        self.step.enter("replay")
        program.inputs.sent.words.copy_(inputs.sent.words)
        program.captured.replay()
        phases = Phases(self._timer, [began, self._timer.now()], ("replay",))
        return replace(program.captured.output.kept(), phases=phases)

    def _note(self, key: Key, program: Program | None) -> None:
        self._programs[key] = program
        if len(self._programs) > KEPT:
            self._programs.popitem(last=False)
