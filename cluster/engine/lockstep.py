"""The part of a step that is the same on leaders and followers: agree on a plan, share the step input, pad it, run it.

No branch checks whether this rank is idle: a rank without requests runs the same code, with no rows or with idle rows.
"""

import time
import zlib
from array import array
from dataclasses import dataclass, field
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
from cluster.engine.schedule import Schedule
from cluster.sampling.grammars import GrammarTable
from cluster.spec.result import StepOutput
from cluster.spec.step import Step


@dataclass(slots=True)
class StepInFlight:
    """A step that this rank has begun with its gang, until its results are committed. `output` is None if no rank had
    rows, or if the gang ends with this step.

    `shape` is the tree of the step's tier. `waits` are the spans in collectives, `ended` is a mark of the step's end on
    the device. `seconds` are the times of the phases. `StepLoop` adds `schedule`, and
    `forwards`, the spans of the model forwards. `began` is when the host began to schedule the step.

    Set when the results are read: `took`, the seconds until then, from the later of two moments: this step began, or
    the step before was read. This rank spent `waited` seconds in collectives, and `own` outside collectives.
    """

    plan: StepPlan
    shape: TreeShape
    output: StepOutput | None
    waits: Spans
    seconds: dict[str, float]
    began: float
    ended: Any = None
    schedule: Schedule = field(default_factory=Schedule)
    forwards: Spans = field(default_factory=Spans)
    took: float = 0.0
    own: float = 0.0
    waited: float = 0.0


@dataclass(slots=True)
class Lockstep:
    """One rank's side of the steps of its gang; `shapes` are the trees by tier.

    `lag` is the number of steps in flight (results not read) when the host begins the next step. Changes that the host
    makes meanwhile reach the device with a later step input, queued behind the steps in flight. So the host frees pages
    and reuses table rows at once: what a step in flight still writes to them is overwritten before another step reads
    it. `leaving` asks for the end of the gang in the next step; `left` says that the gang has ended.
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
        """The step that `programs` runs."""
        return self.programs.step

    @property
    def grammars(self) -> GrammarTable:
        """The grammars of the running requests of this rank's group."""
        return self.step.adjusting.grammars

    def run(self, order: StepInput, requests: int, num_steps: int, decode_us: int = 0) -> StepInFlight:
        """Begin one step with the gang; `read` waits for the end of the step. `order` is the work of this group (empty
        on a follower), `requests` the number of this rank's waiting and running requests, `num_steps` its vote for the
        tier, `decode_us` that of its `Schedule`.

        Raises:
            OutOfStepError: ranks disagree, or this rank was about to deviate from the script.
            PeerLostError: a peer is gone.
        """
        began = time.perf_counter()
        self.watch.follow()
        # Followers must know the length of the packed input before its broadcast, so it is among the facts.
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
        # `naming` raises errors that a lost peer caused as its loss; waits for the device are under the watchdog.
        with self.mesh.naming(), watched(self.watch.catch_up):
            plan = self.coordinator.agree(facts)
            if self.debug:
                self.coordinator.confirm(plan)
            agreed = time.perf_counter() - began
            self.left = plan.leaving
            shape = plan.tree(self.shapes)
            # From here to `end` each collective is compared with the script before it is entered.
            self.exchange.begin(plan.step, self.coordinator.script(), plan.counted)
            output = None if plan.empty or plan.leaving else self._run(order, words, plan, shape)
            self.exchange.end()
            self.coordinator.taken()
            ended = self.watch.mark()
        return StepInFlight(plan, shape, output, self.mesh.world.clock.split(), {"agree": agreed}, began, ended)

    def read(self, ran: StepInFlight) -> StepOutput:
        """Wait for the results of a step that has an output, and return them on the host. All ranks of a group must
        read them between the same two steps, because the next header carries a checksum of the results.

        Raises:
            PeerLostError: a peer is gone, or its heartbeats have stopped.
            StuckDeviceError: this rank's device makes no progress.
        """
        assert ran.output is not None, "nothing was run"
        with self.mesh.naming(), watched(self.watch.catch_up):
            self.watch.wait(ran.ended)
            ran.output = ran.output.read()
        if self.mesh.attn.size > 1:  # the next header carries this: ranks with different tokens have diverged
            self.coordinator.results = _results(ran.output, ran.plan.decodes[self.mesh.dp_rank])
        return ran.output

    def _run(self, order: StepInput, words: list[int], plan: StepPlan, shape: TreeShape) -> StepOutput:
        """Share the step input in the group, pad and run it."""
        mesh = self.mesh
        if mesh.attn.size > 1:
            words = self.exchange.share(words)
            if not mesh.leads:
                order = unpack(words)
        # The mode of the plan, not of the own requests: it decides which calls are in the script.
        order = padded(order._replace(mode=plan.mode), plan, mesh.dp_rank, self.programs.assembler.idle_row)
        if mesh.attn.size > 1:  # the next header carries this: ranks with different inputs have diverged
            self.coordinator.order = checksum(order)
        return self.programs.run(order, plan, shape)


def _results(output: StepOutput, real: int) -> int:
    """Return a checksum of the results of prompts and of the first `real` decoding requests; others are idle."""
    first, _, drawn = output.prompts
    numbers = [*first, *drawn]
    for request in range(real):
        tokens, accept_len, *_ = output.decoded(request)
        numbers += tokens
        numbers.append(accept_len)
    return zlib.crc32(array("q", numbers))
