"""The part of a step that is the same on leaders and followers: agree on a plan, share the step input, pad it, run it.

There is no branch for a rank without requests: it runs the same code, with no rows or with idle rows (padding).
"""

import time
import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from cluster.batch import StepInput
from cluster.config.tree_shape import TreeShape
from cluster.device.timing import Spans
from cluster.device.wait_hook import wait_hook_set
from cluster.distributed.mesh import Mesh
from cluster.distributed.watchdog import DeviceWatchdog
from cluster.dp_attention.coordinator import Coordinator
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.facts import TreeVote
from cluster.dp_attention.padding import pad_step_input
from cluster.dp_attention.plan import StepPlan
from cluster.dp_attention.step_input_codec import checksum, pack, unpack
from cluster.engine.programs import Programs
from cluster.engine.schedule import Schedule
from cluster.sampling.grammars import GrammarTable
from cluster.spec.result import StepOutput
from cluster.spec.step import Step


@dataclass(slots=True)
class StepInFlight:
    """A step that this rank has begun with its gang, and whose results are not committed yet. `output` is None if no
    rank had rows, or if the gang ends with this step.

    `shape` is the shape of the step's trees. `wait_spans` are the time spans in collectives. `end_mark` is the moment
    on the device at which the step ends. `seconds` are the times of the phases by name. `StepLoop` adds `schedule` and
    `forwards`; the latter are the time spans of the model forwards. `started_at` is when the host began to schedule the
    step.

    Three fields are set when the results are read. `elapsed_s` is the time in seconds from the beginning of this step,
    or from the reading of the previous step if that was later. Of this time, the rank spent `wait_s` in collectives and
    `own_s` outside collectives.
    """

    plan: StepPlan
    shape: TreeShape
    output: StepOutput | None
    wait_spans: Spans
    seconds: dict[str, float]
    started_at: float
    end_mark: Any = None
    schedule: Schedule = field(default_factory=Schedule)
    forwards: Spans = field(default_factory=Spans)
    elapsed_s: float = 0.0
    own_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class Lockstep:
    """One rank's side of the steps of its gang. `tree_shapes` are the shapes that trees may have; the index of a shape
    is its tier.

    When the host begins a step, at most `max_in_flight` earlier steps are in flight, that is, their results are not
    read yet. Changes that the host makes meanwhile reach the device with a later step input, queued behind the steps in
    flight. So the host frees pages and reuses table rows at once: what a step in flight still writes to them is
    overwritten before another step reads it. `end_requested` asks for the end of the gang in the next step; `has_ended`
    says that the gang has ended.
    """

    mesh: Mesh
    coordinator: Coordinator
    exchange: Exchange
    programs: Programs
    tree_shapes: tuple[TreeShape, ...]
    watchdog: DeviceWatchdog
    max_in_flight: int = 0
    debug: bool = False
    has_ended: bool = False
    end_requested: bool = False

    @property
    def step(self) -> Step:
        """The step that `programs` runs."""
        return self.programs.step

    @property
    def any_tier(self) -> TreeVote:
        """The vote that allows every tree."""
        return TreeVote(len(self.tree_shapes) - 1)

    @property
    def grammars(self) -> GrammarTable:
        """The grammars of the running requests of this rank's group."""
        return self.step.logits_tables.grammars

    def run(self, step_input: StepInput, requests: int, vote: TreeVote, decode_us: int = 0) -> StepInFlight:
        """Begin one step with the gang; `read` waits for the end of the step. `step_input` is the work of this group
        (empty on a follower), `requests` the number of this rank's waiting and running requests, `vote` this rank's
        vote for the tree, and `decode_us` is `Schedule.decode_us`.

        Raises:
            OutOfStepError: ranks disagree, or this rank was about to deviate from the script (the list of the step's
                collectives).
            PeerLostError: a peer is gone.
        """
        started = time.perf_counter()
        self.watchdog.use_current_thread()
        # Followers must know the length of the packed input before its broadcast, so the header has this length.
        packed_input = pack(step_input) if self.mesh.attn.size > 1 and self.mesh.is_leader else []
        header = self.coordinator.header()
        header = header._replace(
            decodes=len(step_input.decodes),
            prompt_rows=sum(chunk.stop - chunk.start for chunk in step_input.chunks),
            finishing_prompts=sum(chunk.final for chunk in step_input.chunks),
            scored=sum(chunk.scored for chunk in step_input.chunks),
            step_input_len=len(packed_input),
            max_tier=vote.max_tier,
            prompt_us=vote.prompt_us,
            explores=vote.explores,
            measured_tier=vote.measured.tier,
            measured_decodes=vote.measured.decodes,
            measured_us=vote.measured.us,
            measured_context=vote.measured.context,
            measured_overhead_us=vote.measured.overhead_us,
            measured_steps=vote.measured.steps,
            context=sum(decode.min_seq_len for decode in step_input.decodes) // max(1, len(step_input.decodes)),
            outlook=vote.outlook or header.outlook,
            mode=int(step_input.mode),
            requests=requests,
            leaving=int(self.end_requested),
            decode_us=decode_us,
            captured=self.programs.checksum,
            capture_us=self.programs.capture_us,
        )
        # If a lost peer causes an error, `reporting_peer_loss` raises a `PeerLostError` instead. With `wait_hook_set`,
        # the watchdog checks every wait for the device.
        with self.mesh.reporting_peer_loss(), wait_hook_set(self.watchdog.wait_for_device):
            plan = self.coordinator.agree(header)
            if self.debug:
                self.coordinator.confirm(plan)
            agree_s = time.perf_counter() - started
            self.has_ended = plan.leaving
            shape = plan.tree(self.tree_shapes)
            # From here to `end` each collective is compared with the script before it is entered.
            self.exchange.begin(plan.step, self.coordinator.script(), plan.routes_to_experts)
            output = None if plan.empty or plan.leaving else self._run(step_input, packed_input, plan, shape)
            self.exchange.end()
            self.coordinator.finish_step()
            end_mark = self.watchdog.mark()
        return StepInFlight(
            plan, shape, output, self.mesh.world.clock.take_collective_spans(), {"agree": agree_s}, started, end_mark
        )

    def read(self, step: StepInFlight) -> StepOutput:
        """Wait for the results of a step that has an output, and return them on the host. All ranks of a group must
        read them between the same two steps, because the next header carries a checksum of the results.

        Raises:
            PeerLostError: a peer is gone, or its heartbeats have stopped.
            StuckDeviceError: this rank's device makes no progress.
        """
        assert step.output is not None, "a step without rows has no results"
        with self.mesh.reporting_peer_loss(), wait_hook_set(self.watchdog.wait_for_device):
            self.watchdog.wait(step.end_mark)
            step.output = step.output.read()
        if self.mesh.attn.size > 1:  # the next header carries this: ranks with different tokens have diverged
            self.coordinator.results_checksum = _results_checksum(step.output, step.plan.decodes[self.mesh.dp_rank])
        return step.output

    def _run(self, step_input: StepInput, packed_input: list[int], plan: StepPlan, shape: TreeShape) -> StepOutput:
        """Share the step input in the group, pad and run it."""
        mesh = self.mesh
        if mesh.attn.size > 1:
            packed_input = self.exchange.share(packed_input)
            if not mesh.is_leader:
                step_input = unpack(packed_input)
        # Use the plan's mode, not that of this group's requests: the plan's mode decides which calls are in the script.
        step_input = pad_step_input(
            step_input._replace(mode=plan.mode), plan, mesh.dp_rank, self.programs.assembler.idle_row
        )
        if mesh.attn.size > 1:  # the next header carries this: ranks with different inputs have diverged
            self.coordinator.step_input_checksum = checksum(step_input)
        return self.programs.run(step_input, plan, shape)


def _results_checksum(output: StepOutput, real_requests: int) -> int:
    """Return a checksum of the results of prompts and of the first `real_requests` decoding requests. The decoding
    requests after these are padding.
    """
    first_tokens, _, inputs_checksum = output.prompt_results
    values = [*first_tokens, *inputs_checksum]
    for request in range(real_requests):
        tokens, accept_len, *_ = output.decode_result(request)
        values += tokens
        values.append(accept_len)
    return zlib.crc32(array("q", values))
