"""What every rank does in a step, whether it leads its attention group or follows: agree, share, pad, run.

No branch here asks whether this rank is idle: without requests it runs the same code with no rows or with idle ones.
"""

import time
import zlib
from array import array
from dataclasses import dataclass
from typing import Any

from cluster.batch import StepInput
from cluster.config.tree_shape import TreeShape
from cluster.device.timing import Spans
from cluster.device.wait_hook import watched
from cluster.distributed.mesh import Mesh
from cluster.distributed.watchdog import DeviceWatchdog
from cluster.dp_attention.coordinator import Coordinator
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.padding import padded
from cluster.dp_attention.plan import StepPlan
from cluster.dp_attention.step_input_codec import checksum, pack, unpack
from cluster.engine.programs import Programs
from cluster.sampling.grammars import GrammarTable
from cluster.spec.result import Results, StepDecisions
from cluster.spec.step import Step


@dataclass(frozen=True, slots=True)
class GangStep:
    """A step that this rank has begun with its gang. `output` is None if no rank had rows, or if the gang ends with it.

    `shape` is the tree of the step's tier, `real` the number of requests that decode, idle ones left out; `waits` are
    the spans spent in collectives, `agreed` the seconds of the agreement, `ended` is when the device has run it.
    """

    plan: StepPlan
    shape: TreeShape
    output: Results | None
    real: int
    waits: Spans
    agreed: float
    ended: Any = None


@dataclass(slots=True)
class Lockstep:
    """One rank's side of the gang's steps; `shapes` are the trees by tier.

    `lag` is how many steps the host is ahead of a device that runs behind it: it begins the next step before it reads
    the results of that many. Whatever is decided meanwhile reaches the device with a later order, so behind the steps
    under way: pages can be freed and rows given to others at once, and what those steps still write there is
    overwritten before anybody reads it.
    """

    mesh: Mesh
    coordinator: Coordinator
    exchange: Exchange
    programs: Programs
    shapes: tuple[TreeShape, ...]
    watch: DeviceWatchdog
    lag: int = 0
    debug: bool = False
    left: bool = False
    leaving: bool = False

    @property
    def step(self) -> Step:
        """The step that the programs run."""
        return self.programs.step

    @property
    def grammars(self) -> GrammarTable:
        """The grammars of the requests that run in this rank's group."""
        return self.step.adjusting.grammars

    def leave(self) -> None:
        """Tell all ranks with the next step that the gang ends."""
        self.leaving = True

    def run(self, order: StepInput, requests: int, num_steps: int, decode_us: int = 0) -> GangStep:
        """Begin one step with the gang; `read` waits for its end. `order` is this group's work, empty on a follower;
        `requests` counts this rank's waiting and running ones, `num_steps` is its vote for the tier, `decode_us` what
        its decoding is to take.

        Raises:
            OutOfStepError: ranks disagree, or this rank was about to deviate from the script.
            PeerLostError: a peer is gone.
        """
        began = time.perf_counter()
        self.watch.follow()
        words = pack(order) if self.mesh.attn.size > 1 and self.mesh.leads else []
        facts = self.coordinator.header()._replace(
            decodes=len(order.decodes),
            prompt_rows=sum(chunk.stop - chunk.start for chunk in order.chunks),
            finals=sum(chunk.final for chunk in order.chunks),
            scored=sum(chunk.scored for chunk in order.chunks),
            order_words=len(words),
            num_steps=num_steps,
            mode=int(order.mode),
            requests=requests,
            leaving=int(self.leaving),
            decode_us=decode_us,
            captured=self.programs.checksum,
        )
        with self.mesh.naming(), watched(self.watch.catch_up):
            plan = self.coordinator.agree(facts)
            if self.debug:
                self.coordinator.confirm(plan)
            agreed = time.perf_counter() - began
            self.left = plan.leaving
            shape = plan.tree(self.shapes)
            self.exchange.begin(plan.step, self.coordinator.script(), plan.counted)
            real, output = (0, None) if plan.empty or plan.leaving else self._run(order, words, plan, shape)
            self.exchange.end()
            self.coordinator.taken()
            ended = self.watch.mark()
        return GangStep(plan, shape, output, real, self.mesh.world.clock.split(), agreed, ended)

    def read(self, ran: GangStep) -> StepDecisions:
        """Wait for the end of a step that has an output. The ranks of a group read after equally many later steps.

        Raises:
            PeerLostError: a peer is gone, or gives no sign any more.
            StuckDeviceError: this rank's device does nothing any more.
        """
        assert ran.output is not None, "nothing was run"
        with self.mesh.naming(), watched(self.watch.catch_up):
            self.watch.wait(ran.ended)
            decided = ran.output.read()
        if self.mesh.attn.size > 1:  # the next header carries this: ranks with other tokens have diverged
            self.coordinator.decided(_results(decided, ran.real))
        return decided

    def _run(self, order: StepInput, words: list[int], plan: StepPlan, shape: TreeShape) -> tuple[int, Results]:
        mesh = self.mesh
        if mesh.attn.size > 1:
            words = self.exchange.share(words)
            if not mesh.leads:
                order = unpack(words)
        real, order = len(order.decodes), order._replace(mode=plan.mode)
        order = padded(order, plan, mesh.dp_rank, self.programs.assembler.idle_row)
        if mesh.attn.size > 1:  # the next header carries this: ranks with other orders have diverged
            self.coordinator.ordered(checksum(order))
        return real, self.programs.run(order, plan, shape)


def _results(output: StepDecisions, real: int) -> int:
    """A checksum of what a step decided for the first `real` decoding requests, idle ones left out, and for prompts."""
    numbers = [number for row in output.tokens[:real] for number in row]
    return zlib.crc32(array("q", [*numbers, *output.accept_len[:real], *output.first, *output.drawn]))
