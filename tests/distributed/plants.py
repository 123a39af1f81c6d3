"""Planted divergences: faults of one rank only. The gang must report each, and must not compute with its effects.

A plant is a function that changes one rank through a `FaultInjector`, which decides when the fault triggers and undoes
all changes.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cluster.batch import Batch, SamplingMode
from cluster.config.tree_shape import TreeShape
from cluster.distributed.mesh import Axis
from cluster.dp_attention.facts import RankFacts
from cluster.dp_attention.plan import StepPlan
from cluster.dp_attention.sizes import Sizes, max_sizes
from cluster.engine import Rank, lockstep
from cluster.spec.inputs import EagleDraftInput
from tests.distributed.harm import FaultInjector, Plant, call_twice, plant_before_agreement, plant_call, plant_plan
from tests.distributed.of_captures import CAPTURE_PLANTS
from tests.distributed.of_experts import EXPERT_PLANTS


def plant(name: str, rank: Rank, at_step: int, on_triggered: Callable[[int], None]) -> Callable[[], None]:
    """Plant the fault called `name` in a rank; return a function that undoes all changes."""
    injector = FaultInjector(rank, at_step, on_triggered)
    PLANTS[name](injector)
    return injector.undo


def skip_call(op: str, phase: str) -> Plant:
    """A plant: the rank skips one call `op` of the exchange, and continues with a made-up result of the right shape."""

    def faulty(injector: FaultInjector, rows: Tensor, local: Callable[[Tensor], Tensor] | None = None) -> Any:
        call = injector.exchange._script[0]
        own_rows, all_rows = call.rows[injector.mesh.dp_rank], sum(call.rows)
        if op == "head":
            return rows.new_zeros(
                injector.exchange._num_scored_rows(call), call.columns
            ), injector.exchange._first_own_row(call)
        if op == "embed":
            assert local is not None
            return local(rows)
        if op == "compare":
            return rows[:own_rows].expand(injector.exchange.size, own_rows, call.width)
        if op in ("gather", "spread"):
            return rows.new_zeros(all_rows, call.width)
        return rows[:own_rows] if op == "scatter" else rows

    return lambda injector: injector.replace_exchange_call(op, phase, lambda _, *args: faulty(injector, *args))


def scatter_instead_of_gather(injector: FaultInjector) -> None:
    """Call scatter where the script has gather, at the beginning of an MLP."""
    injector.replace_exchange_call("gather", "target", lambda _, rows: injector.exchange.scatter(rows))


def skip_layer(injector: FaultInjector) -> None:
    """Leave out the last layer of the target."""

    def run(original: Callable[..., Any], *args: Any) -> Any:
        model = injector.step._target.model
        injector.replace_attribute(model, "_layers", model._layers[:-1])
        return original(*args)

    injector.replace_step(run)


def skip_draft_level(injector: FaultInjector) -> None:
    """Draft one level less than the planned tree has."""
    original = injector.step._draft.draft

    def draft(batch: Any, carried: Any, noise: Any, shape: TreeShape) -> Any:
        if shape.num_steps > 1 and injector.triggers_at(injector.exchange._step):
            shape = injector.lockstep.tree_shapes[shape.num_steps - 1]
        return original(batch, carried, noise, shape)

    injector.replace_attribute(injector.step._draft, "draft", draft)


def skip_extend(injector: FaultInjector) -> None:
    """Skip the extend phase: give the next step an idle draft input in place of running committed rows in the draft."""
    draft = injector.step._draft
    original = draft.extend

    def extend(batch: Batch, *args: Any) -> EagleDraftInput:
        if not injector.triggers_at(injector.exchange._step):
            return original(batch, *args)
        spec, carried = draft._runner.model.spec, injector.step.draft_inputs
        rows, device = batch.rows.shape[0], carried.hidden.device
        return EagleDraftInput.create_idle_input(spec, draft._ranking._topk, carried.hidden.dtype, device, rows)

    injector.replace_attribute(draft, "extend", extend)


def skip_collective(name: str) -> Plant:
    """A plant: the mesh returns zeros in place of entering the collective `name` over the world."""

    def plant(injector: FaultInjector) -> None:
        original = getattr(Axis, name)

        def collective(axis: Axis, rows: Tensor, counts: list[int]) -> Tensor:
            step, phase = injector.mesh.position
            if axis is injector.mesh.world and phase != "agree" and injector.triggers_at(step):
                return rows.new_zeros({"gather": sum(counts)}.get(name, counts[axis.rank]), *rows.shape[1:])
            result: Tensor = original(axis, rows, counts)
            return result

        injector.replace_attribute(Axis, name, collective)

    return plant


def use_lower_tier(injector: FaultInjector) -> None:
    injector.replace_step(
        lambda original, batch, shape: original(batch, injector.lockstep.tree_shapes[shape.num_steps - 1])
    )


def repeat_last_output(injector: FaultInjector) -> None:
    """Return the results of the last step again, without running a step."""
    original, last_output = injector.step.run, []

    def run(batch: Any, shape: TreeShape) -> Any:
        if last_output and injector.triggers_at(injector.exchange._step):
            return last_output[0]
        last_output[:] = [original(batch, shape)]
        return last_output[0]

    injector.replace_attribute(injector.step, "run", run)


def use_last_plan(injector: FaultInjector) -> None:
    """Use the plan of the step before, in a step whose own plan differs from it."""
    original, last_plan = injector.coordinator.agree, []

    def agree(facts: RankFacts) -> StepPlan:
        plan = original(facts)
        changed = last_plan and last_plan[0].decodes != plan.decodes and not plan.no_requests
        if changed and injector.triggers_at(plan.step):
            return last_plan[0]  # type: ignore[no-any-return]
        last_plan[:] = [plan]
        return plan

    injector.replace_attribute(injector.coordinator, "agree", agree)


def agree_twice(injector: FaultInjector) -> None:
    original = injector.coordinator.agree

    def agree(facts: RankFacts) -> StepPlan:
        plan = original(facts)
        return original(injector.coordinator.header()) if injector.triggers_at(plan.step) else plan

    injector.replace_attribute(injector.coordinator, "agree", agree)


def announce_extra_decode(injector: FaultInjector) -> None:
    """Announce one decoding request more than the rank has."""
    original = injector.coordinator.agree
    injector.replace_attribute(
        injector.coordinator,
        "agree",
        lambda facts: original(facts._replace(decodes=facts.decodes + injector.triggers_at(facts.step))),
    )


def skip_padding(injector: FaultInjector) -> None:
    """Run a step input without the padding that its plan asks for."""
    original = lockstep.pad_step_input

    def pad(step_input: Any, plan: StepPlan, group: int, idle_row: int) -> Any:
        padded_input = original(step_input, plan, group, idle_row)
        return step_input if padded_input != step_input and injector.triggers_at(plan.step) else padded_input

    injector.replace_attribute(lockstep, "pad_step_input", pad)


def shift_step(injector: FaultInjector, offset: int) -> None:
    injector.coordinator.step += offset


def remove_tree_node(injector: FaultInjector) -> None:
    *other_shapes, deepest = injector.coordinator._shapes
    injector.coordinator._shapes = (
        *other_shapes,
        deepest.model_copy(update={"num_draft_tokens": deepest.num_draft_tokens - 1}),
    )


def change_padding_rule(injector: FaultInjector) -> None:
    injector.coordinator._rule = replace(injector.coordinator._rule, padding="padded", max_idle_share=0.9)


def plant_unpacked_input(faulty: Callable[[Any], Any]) -> Plant:
    """A plant: a follower runs `faulty(step_input)` in place of the step input that its leader sent."""
    return lambda injector: injector.replace_unpacked_input(faulty)


def rotate_chunk_rows(step_input: Any) -> Any:
    """Give each chunk the row of the next one. The chunks stay in order of length, which every step needs to run."""
    rows = [chunk.row for chunk in step_input.chunks]
    turned = tuple(chunk._replace(row=row) for chunk, row in zip(step_input.chunks, rows[1:] + rows[:1], strict=True))
    return step_input._replace(chunks=turned) if len(set(rows)) > 1 else None


def drop_decode(step_input: Any) -> Any:
    return step_input._replace(decodes=step_input.decodes[1:]) if step_input.decodes else None


def reverse_decodes(step_input: Any) -> Any:
    return step_input._replace(decodes=step_input.decodes[::-1]) if len(step_input.decodes) > 1 else None


def drop_writes(step_input: Any) -> Any:
    return step_input._replace(writes=()) if step_input.writes else None


def change_seeds(step_input: Any) -> Any:
    changed = tuple(s._replace(seed=s.seed + 1) for s in step_input.samplings)
    return step_input._replace(samplings=changed) if changed else None


def change_results(original: Callable[..., Any], *args: Any) -> Any:
    """Run the step, and add 1 to the first token of each decoding request in the results."""
    output = original(*args)
    changed = output.packed.clone()
    changed[: output.requests * (output.path_length + 2)].view(output.requests, -1)[:, 0] += 1
    return replace(output, packed=changed)


def change_noise(original: Callable[..., Any], batch: Batch, shape: TreeShape) -> Any:
    """Sample with other noise than the leader of this follower. The noise is scaled up by 1000, so that the follower
    chooses another token in the same step.
    """
    changed_sampling = replace(
        batch.sampling, seeds=batch.sampling.seeds + 1, noise_scale=batch.sampling.noise_scale * 1e3
    )
    return original(replace(batch, sampling=changed_sampling), shape)


def weaken_draft(injector: FaultInjector) -> None:
    """From step `at_step` on the draft's MLP adds zeros on this rank. The rank stays in step with its peers."""
    original = injector.exchange.scatter

    def scatter(rows: Tensor) -> Tensor:
        phase = injector.exchange._script[0].phase
        summed: Tensor = original(rows)
        if phase == "target" or injector.exchange._step < injector._at_step:
            return summed
        injector.triggers_at(injector.exchange._step)
        return summed.zero_()

    injector.replace_attribute(injector.exchange, "scatter", scatter)


def plant_step(faulty: Callable[..., Any]) -> Plant:
    """A plant: `faulty(original, batch, shape)` replaces the run of one step."""
    return lambda injector: injector.replace_step(faulty)


def disable_in_step(name: str) -> Plant:
    """A plant: one step runs without log-probabilities, or with the flag `name` of the sampling batch set to False."""

    def faulty(original: Callable[..., Any], batch: Batch, shape: TreeShape) -> Any:
        if name == "logprobs":
            return original(replace(batch, mode=batch.mode & ~SamplingMode.LOGPROBS), shape)
        return original(replace(batch, sampling=replace(batch.sampling, **{name: False})), shape)

    return plant_step(faulty)


def toggle_padding(plan: StepPlan) -> StepPlan:
    """The plan padded if it was not, and unpadded if it was padded."""
    real = tuple(map(Sizes, plan.decodes, plan.prompt_rows, plan.finishing_prompts))
    return plan._replace(sizes=(max_sizes(real),) * len(real) if plan.sizes == real else real)


def toggle_random_mode(plan: StepPlan) -> StepPlan:
    return plan._replace(mode=plan.mode ^ SamplingMode.RANDOM)


def raise_error(*_: Any) -> Any:
    raise ValueError("a bug of this rank alone")


def kill_own_process(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


SHARD_PLANTS: dict[str, Plant] = {
    **{
        f"skips {op}, {phase}": skip_call(op, phase)
        for phase in ("draft", "target", "extend")
        for op in ("spread", "highest", "add", "compare")
    },
    "one sum more": plant_call("add", "target", call_twice),
    "one comparison more": plant_call("compare", "extend", call_twice),
    "one row less to spread": plant_call("spread", "target", lambda original, words: original(words[:-1])),
    "one word less to spread": plant_call("spread", "draft", lambda original, words: original(words[:, :-1])),
    "own rows only compared": plant_call("compare", "target", lambda original, numbers: original(numbers[:-1])),
    "one candidate less": plant_call("compare", "draft", lambda original, numbers: original(numbers[:, 2:])),
    "candidates in float32": plant_call("compare", "target", lambda original, numbers: original(numbers.float())),
    "half a histogram": plant_call("add", "draft", lambda original, numbers: original(numbers[:, :128])),
    "a histogram in int32": plant_call("add", "extend", lambda original, numbers: original(numbers.int())),
    "sums before the highest": lambda harm: harm.replace_exchange_call(
        "highest", "target", lambda _, numbers: harm.exchange.add(numbers.long()).double()
    ),
    "runs without noise": disable_in_step("any_random"),
    "runs without filters": disable_in_step("any_filtered"),
    "reports no log-probabilities": disable_in_step("logprobs"),
    "one candidate less in a group": plant_call(
        "compare", "extend", lambda original, numbers: original(numbers[:, 2:])
    ),
    "skips a sum in a group": skip_call("add", "target"),
    "skips a comparison in a group": skip_call("compare", "target"),
}
"""The plants by name that need a sharded head, and requests with sampling filters that ask for log-probabilities."""

PLANTS: dict[str, Plant] = {
    **{
        f"skips {op}, {phase}": skip_call(op, phase)
        for phase in ("draft", "target", "extend")
        for op in ("embed", "reduce", "gather", "scatter", "head")
    },
    **SHARD_PLANTS,
    "skips a layer": skip_layer,
    "skips a draft level": skip_draft_level,
    "skips the extend phase": skip_extend,
    "does not take the step": repeat_last_output,
    "gather not entered": skip_collective("gather"),
    "reduce_scatter not entered": skip_collective("reduce_scatter"),
    "one gather more": plant_call("gather", "draft", call_twice),
    "one reduce more": plant_call("reduce", "extend", call_twice),
    "one head more": plant_call("head", "extend", call_twice),
    "scatter before gather": scatter_instead_of_gather,
    "one row more": plant_call("gather", "target", lambda original, rows: original(torch.cat([rows, rows[:1]]))),
    "one row less": plant_call("gather", "target", lambda original, rows: original(rows[:-1])),
    "one id less": plant_call("embed", "draft", lambda original, ids, lookup: original(ids[:-1], lookup)),
    "one summed row less": plant_call("scatter", "extend", lambda original, rows: original(rows[:-1])),
    "wrong hidden width": plant_call("gather", "draft", lambda original, rows: original(rows[:, :-1])),
    "wrong width of a sum": plant_call("reduce", "target", lambda original, rows: original(rows.repeat(1, 2))),
    "wrong head width": plant_call(
        "head", "target", lambda original, rows, project: original(rows, lambda head_rows: project(head_rows)[:, 1:])
    ),
    "wrong dtype": plant_call("scatter", "target", lambda original, rows: original(rows.float())),
    "other tier": use_lower_tier,
    "stale plan": use_last_plan,
    "stale plan of the rule": plant_plan(lambda plan: plan._replace(step=plan.step - 1)),
    "stale epoch": plant_before_agreement(lambda harm: setattr(harm.mesh, "epoch", harm.mesh.epoch - 1)),
    "skipped step": plant_before_agreement(lambda harm: shift_step(harm, 1)),
    "step taken twice": plant_before_agreement(lambda harm: shift_step(harm, -1)),
    "other last plan": plant_before_agreement(lambda harm: setattr(harm.coordinator, "_plan_digest", 1)),
    "agrees twice": agree_twice,
    "other padding rule": plant_before_agreement(change_padding_rule),
    "other tree": plant_before_agreement(remove_tree_node),
    "wrong group": plant_before_agreement(lambda harm: setattr(harm.mesh, "attn", harm.mesh.world)),
    "false facts": announce_extra_decode,
    "no idle rows": skip_padding,
    "follower rotates the chunks": plant_unpacked_input(rotate_chunk_rows),
    "follower drops a request": plant_unpacked_input(drop_decode),
    "follower reverses the requests": plant_unpacked_input(reverse_decodes),
    "follower loses writes": plant_unpacked_input(drop_writes),
    "follower uses other seeds": plant_unpacked_input(change_seeds),
    "follower uses other noise": plant_step(change_noise),
    "breaks": plant_step(raise_error),
    "dies": plant_step(kill_own_process),
    "weak draft": weaken_draft,
    "other plan, padding": plant_plan(toggle_padding),
    "other plan, tier": plant_plan(lambda plan: plan._replace(tier=max(0, plan.tier - 1))),
    "other plan, mode": plant_plan(toggle_random_mode),
    **CAPTURE_PLANTS,
    **EXPERT_PLANTS,
    "other results": plant_step(change_results),
}
"""All plants by name."""
