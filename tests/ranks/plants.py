"""Planted divergences: what goes wrong on one rank only, from one step on. Each must be reported, never acted out.

A plant is a function that changes the rank behind a `Harm`, which says when it is due and takes everything back.
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
from cluster.dp_attention.plan import RankFacts, StepPlan
from cluster.dp_attention.sizes import Sizes, max_sizes
from cluster.engine import Rank, lockstep
from cluster.spec.inputs import EagleDraftInput
from tests.ranks.harm import Harm, Plant, instead, planned, set_before, twice
from tests.ranks.of_captures import OF_CAPTURES
from tests.ranks.of_experts import OF_EXPERTS


def plant(name: str, rank: Rank, at_step: int, struck: Callable[[int], None]) -> Callable[[], None]:
    """Plant it in this rank; returns what undoes it."""
    harm = Harm(rank, at_step, struck)
    PLANTS[name](harm)
    return harm.undo


def skip(op: str, phase: str) -> Plant:
    """Do not call it, go on with a result of the right shape."""

    def wrong(harm: Harm, rows: Tensor, local: Callable[[Tensor], Tensor] | None = None) -> Any:
        call = harm.exchange._script[0]
        own, every = call.rows[harm.mesh.dp_rank], sum(call.rows)
        if op == "head":
            return rows.new_zeros(harm.exchange._num_scored_rows(call), call.columns), harm.exchange._first_own_row(
                call
            )
        if op == "embed":
            assert local is not None
            return local(rows)
        if op == "compare":
            return rows[:own].expand(harm.exchange.size, own, call.width)
        if op in ("gather", "spread"):
            return rows.new_zeros(every, call.width)
        return rows[:own] if op == "scatter" else rows

    return lambda harm: harm.in_call(op, phase, lambda _, *args: wrong(harm, *args))


def swapped(harm: Harm) -> None:
    """Calls scatter where the MLP begins."""
    harm.in_call("gather", "target", lambda _, rows: harm.exchange.scatter(rows))


def whole_layer(harm: Harm) -> None:
    def run(true: Callable[..., Any], *args: Any) -> Any:
        model = harm.step._target.model
        harm.put(model, "_layers", model._layers[:-1])
        return true(*args)

    harm.in_run(run)


def draft_level(harm: Harm) -> None:
    """Drafts one level less than the tree has."""
    true = harm.step._draft.draft

    def draft(batch: Any, carried: Any, noise: Any, shape: TreeShape) -> Any:
        if shape.num_steps > 1 and harm.due(harm.exchange._step):
            shape = harm.lockstep.tree_shapes[shape.num_steps - 1]
        return true(batch, carried, noise, shape)

    harm.put(harm.step._draft, "draft", draft)


def no_extend(harm: Harm) -> None:
    """Carries nothing over instead of running the committed rows through the draft."""
    draft = harm.step._draft
    true = draft.extend

    def extend(batch: Batch, *args: Any) -> EagleDraftInput:
        if not harm.due(harm.exchange._step):
            return true(batch, *args)
        spec, carried = draft._runner.model.spec, harm.step.draft_inputs
        rows, device = batch.rows.shape[0], carried.hidden.device
        return EagleDraftInput.create_idle_input(spec, draft._ranking._topk, carried.hidden.dtype, device, rows)

    harm.put(draft, "extend", extend)


def not_entered(name: str) -> Plant:
    """The mesh returns without entering the collective, as if there were nothing to send."""

    def plant(harm: Harm) -> None:
        true = getattr(Axis, name)

        def collective(axis: Axis, rows: Tensor, counts: list[int]) -> Tensor:
            step, phase = harm.mesh.position
            if axis is harm.mesh.world and phase != "agree" and harm.due(step):
                return rows.new_zeros({"gather": sum(counts)}.get(name, counts[axis.rank]), *rows.shape[1:])
            result: Tensor = true(axis, rows, counts)
            return result

        harm.put(Axis, name, collective)

    return plant


def other_tier(harm: Harm) -> None:
    harm.in_run(lambda true, batch, shape: true(batch, harm.lockstep.tree_shapes[shape.num_steps - 1]))


def not_taken(harm: Harm) -> None:
    """Gives the last step's results again, without a step."""
    true, last = harm.step.run, []

    def run(batch: Any, shape: TreeShape) -> Any:
        if last and harm.due(harm.exchange._step):
            return last[0]
        last[:] = [true(batch, shape)]
        return last[0]

    harm.put(harm.step, "run", run)


def stale_plan(harm: Harm) -> None:
    """Runs the plan of the step before, once it is another one."""
    true, last = harm.coordinator.agree, []

    def agree(facts: RankFacts) -> StepPlan:
        plan = true(facts)
        changed = last and last[0].decodes != plan.decodes and not plan.no_requests
        if changed and harm.due(plan.step):
            return last[0]  # type: ignore[no-any-return]
        last[:] = [plan]
        return plan

    harm.put(harm.coordinator, "agree", agree)


def agrees_twice(harm: Harm) -> None:
    true = harm.coordinator.agree

    def agree(facts: RankFacts) -> StepPlan:
        plan = true(facts)
        return true(harm.coordinator.header()) if harm.due(plan.step) else plan

    harm.put(harm.coordinator, "agree", agree)


def false_facts(harm: Harm) -> None:
    """Announces one decoding request more than it has."""
    true = harm.coordinator.agree
    harm.put(
        harm.coordinator,
        "agree",
        lambda facts: true(facts._replace(decodes=facts.decodes + harm.due(facts.step))),
    )


def no_idle_rows(harm: Harm) -> None:
    """Forgets to pad."""
    true = lockstep.pad_step_input

    def padded(order: Any, plan: StepPlan, group: int, idle_row: int) -> Any:
        full = true(order, plan, group, idle_row)
        return order if full != order and harm.due(plan.step) else full

    harm.put(lockstep, "pad_step_input", padded)


def later(harm: Harm, by: int) -> None:
    harm.coordinator.step += by


def other_tree(harm: Harm) -> None:
    *others, deepest = harm.coordinator._shapes
    harm.coordinator._shapes = (*others, deepest.model_copy(update={"num_draft_tokens": deepest.num_draft_tokens - 1}))


def other_padding(harm: Harm) -> None:
    harm.coordinator._rule = replace(harm.coordinator._rule, padding="padded", max_idle_share=0.9)


def unpacked(wrong: Callable[[Any], Any]) -> Plant:
    return lambda harm: harm.in_unpacked(wrong)


def chunks_turned(order: Any) -> Any:
    """Each chunk in another's row; they stay in order of length, without which no step could run."""
    rows = [chunk.row for chunk in order.chunks]
    turned = tuple(chunk._replace(row=row) for chunk, row in zip(order.chunks, rows[1:] + rows[:1], strict=True))
    return order._replace(chunks=turned) if len(set(rows)) > 1 else None


def decode_dropped(order: Any) -> Any:
    return order._replace(decodes=order.decodes[1:]) if order.decodes else None


def decodes_turned(order: Any) -> Any:
    return order._replace(decodes=order.decodes[::-1]) if len(order.decodes) > 1 else None


def writes_lost(order: Any) -> Any:
    return order._replace(writes=()) if order.writes else None


def other_seed(order: Any) -> Any:
    changed = tuple(s._replace(seed=s.seed + 1) for s in order.samplings)
    return order._replace(samplings=changed) if changed else None


def other_results(true: Callable[..., Any], *args: Any) -> Any:
    stepped = true(*args)
    other = stepped.packed.clone()
    other[: stepped.requests * (stepped.path_length + 2)].view(stepped.requests, -1)[:, 0] += 1
    return replace(stepped, packed=other)


def other_draws(true: Callable[..., Any], batch: Batch, shape: TreeShape) -> Any:
    """Draws with other noise than its leader, whose order it runs: loud enough to choose another token at once."""
    own = replace(batch.sampling, seeds=batch.sampling.seeds + 1, noise_scale=batch.sampling.noise_scale * 1e3)
    return true(replace(batch, sampling=own), shape)


def weak_draft(harm: Harm) -> None:
    """In step with everybody, but from now on the draft's MLP adds nothing on this rank."""
    true = harm.exchange.scatter

    def scatter(rows: Tensor) -> Tensor:
        phase = harm.exchange._script[0].phase
        summed: Tensor = true(rows)
        if phase == "target" or harm.exchange._step < harm._at_step:
            return summed
        harm.due(harm.exchange._step)
        return summed.zero_()

    harm.put(harm.exchange, "scatter", scatter)


def ran(wrong: Callable[..., Any]) -> Plant:
    return lambda harm: harm.in_run(wrong)


def without(name: str) -> Plant:
    """Runs the step in another mode than is planned."""

    def wrong(true: Callable[..., Any], batch: Batch, shape: TreeShape) -> Any:
        if name == "logprobs":
            return true(replace(batch, mode=batch.mode & ~SamplingMode.LOGPROBS), shape)
        return true(replace(batch, sampling=replace(batch.sampling, **{name: False})), shape)

    return ran(wrong)


def other_padded(plan: StepPlan) -> StepPlan:
    """Padded where it is not, and the other way round."""
    real = tuple(map(Sizes, plan.decodes, plan.prompt_rows, plan.finishing_prompts))
    return plan._replace(sizes=(max_sizes(real),) * len(real) if plan.sizes == real else real)


def other_mode(plan: StepPlan) -> StepPlan:
    return plan._replace(mode=plan.mode ^ SamplingMode.RANDOM)


def breaks(*_: Any) -> Any:
    raise ValueError("a bug of this rank alone")


def dies(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


OF_SHARDS: dict[str, Plant] = {
    **{
        f"skips {op}, {phase}": skip(op, phase)
        for phase in ("draft", "target", "extend")
        for op in ("spread", "highest", "add", "compare")
    },
    "one sum more": instead("add", "target", twice),
    "one comparison more": instead("compare", "extend", twice),
    "one row less to spread": instead("spread", "target", lambda true, words: true(words[:-1])),
    "one word less to spread": instead("spread", "draft", lambda true, words: true(words[:, :-1])),
    "own rows only compared": instead("compare", "target", lambda true, numbers: true(numbers[:-1])),
    "one candidate less": instead("compare", "draft", lambda true, numbers: true(numbers[:, 2:])),
    "candidates in float32": instead("compare", "target", lambda true, numbers: true(numbers.float())),
    "half a histogram": instead("add", "draft", lambda true, numbers: true(numbers[:, :128])),
    "a histogram in int32": instead("add", "extend", lambda true, numbers: true(numbers.int())),
    "sums before the highest": lambda harm: harm.in_call(
        "highest", "target", lambda _, numbers: harm.exchange.add(numbers.long()).double()
    ),
    "runs without noise": without("any_random"),
    "runs without filters": without("any_filtered"),
    "reports no log-probabilities": without("logprobs"),
    "one candidate less in a group": instead("compare", "extend", lambda true, numbers: true(numbers[:, 2:])),
    "skips a sum in a group": skip("add", "target"),
    "skips a comparison in a group": skip("compare", "target"),
}
"""What can happen only where a head is sharded; for requests with filters that ask for log-probabilities."""

PLANTS: dict[str, Plant] = {
    **{
        f"skips {op}, {phase}": skip(op, phase)
        for phase in ("draft", "target", "extend")
        for op in ("embed", "reduce", "gather", "scatter", "head")
    },
    **OF_SHARDS,
    "skips a layer": whole_layer,
    "skips a draft level": draft_level,
    "skips the extend phase": no_extend,
    "does not take the step": not_taken,
    "gather not entered": not_entered("gather"),
    "reduce_scatter not entered": not_entered("reduce_scatter"),
    "one gather more": instead("gather", "draft", twice),
    "one reduce more": instead("reduce", "extend", twice),
    "one head more": instead("head", "extend", twice),
    "scatter before gather": swapped,
    "one row more": instead("gather", "target", lambda true, rows: true(torch.cat([rows, rows[:1]]))),
    "one row less": instead("gather", "target", lambda true, rows: true(rows[:-1])),
    "one id less": instead("embed", "draft", lambda true, ids, lookup: true(ids[:-1], lookup)),
    "one summed row less": instead("scatter", "extend", lambda true, rows: true(rows[:-1])),
    "wrong hidden width": instead("gather", "draft", lambda true, rows: true(rows[:, :-1])),
    "wrong width of a sum": instead("reduce", "target", lambda true, rows: true(rows.repeat(1, 2))),
    "wrong head width": instead(
        "head", "target", lambda true, rows, project: true(rows, lambda given: project(given)[:, 1:])
    ),
    "wrong dtype": instead("scatter", "target", lambda true, rows: true(rows.float())),
    "other tier": other_tier,
    "stale plan": stale_plan,
    "stale plan of the rule": planned(lambda plan: plan._replace(step=plan.step - 1)),
    "stale epoch": set_before(lambda harm: setattr(harm.mesh, "epoch", harm.mesh.epoch - 1)),
    "skipped step": set_before(lambda harm: later(harm, 1)),
    "step taken twice": set_before(lambda harm: later(harm, -1)),
    "other last plan": set_before(lambda harm: setattr(harm.coordinator, "_plan_digest", 1)),
    "agrees twice": agrees_twice,
    "other padding rule": set_before(other_padding),
    "other tree": set_before(other_tree),
    "wrong group": set_before(lambda harm: setattr(harm.mesh, "attn", harm.mesh.world)),
    "false facts": false_facts,
    "no idle rows": no_idle_rows,
    "follower turns the chunks": unpacked(chunks_turned),
    "follower drops a request": unpacked(decode_dropped),
    "follower turns the requests": unpacked(decodes_turned),
    "follower loses writes": unpacked(writes_lost),
    "follower samples otherwise": unpacked(other_seed),
    "follower draws otherwise": ran(other_draws),
    "breaks": ran(breaks),
    "dies": ran(dies),
    "weak draft": weak_draft,
    "other plan, padding": planned(other_padded),
    "other plan, tier": planned(lambda plan: plan._replace(num_steps=max(0, plan.num_steps - 1))),
    "other plan, mode": planned(other_mode),
    **OF_CAPTURES,
    **OF_EXPERTS,
    "other results": ran(other_results),
}
