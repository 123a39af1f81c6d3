"""Planted divergences of what is captured: keys, the programs that a rank has, the calls that one makes."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from cluster.batch import SamplingMode
from cluster.device.staging import StagedLists
from cluster.distributed.mesh import Axis
from cluster.dp_attention.plan import ScriptCall, StepPlan
from cluster.dp_attention.sizes import Buckets
from cluster.engine.programs import Program
from cluster.spec.result import StepOutput
from tests.ranks.harm import Harm, Plant, planned, set_before


def other_key(plan: StepPlan) -> StepPlan:
    """The next size of programs."""
    larger = tuple(own._replace(decodes=2 * own.decodes) for own in plan.sizes)
    return plan._replace(sizes=larger) if plan.captured else plan


def other_sizes(harm: Harm) -> None:
    harm.coordinator._rule = replace(harm.coordinator._rule, buckets=Buckets((1, 2, 4, 8, 16, 64)))


def captured_nothing(harm: Harm) -> None:
    for key in harm.lockstep.programs.captured:
        harm.lockstep.programs.remove(key)


def lacks_a_program(harm: Harm) -> None:
    harm.lockstep.programs.remove(next(iter(harm.lockstep.programs.captured)))


def a_program_more(harm: Harm) -> None:
    programs = harm.lockstep.programs
    key, program = next(iter(programs.captured.items()))
    programs.add(key._replace(mode=key.mode + SamplingMode.LOGPROBS), program)


def not_entered(harm: Harm) -> None:
    """A replay leaves a collective out."""
    true = Axis.gather

    def gather(axis: Axis, rows: Tensor, counts: list[int]) -> Tensor:
        step, phase = harm.mesh.position
        if axis is harm.mesh.world and phase == "replay" and harm.due(step):
            return rows.new_zeros(sum(counts), *rows.shape[1:])
        return true(axis, rows, counts)

    harm.put(Axis, "gather", gather)


def replayed(change: Callable[[tuple[ScriptCall, ...]], tuple[ScriptCall, ...]]) -> Plant:
    """Replays what was captured for another script."""

    def plant(harm: Harm) -> None:
        programs = harm.lockstep.programs
        true = programs._replay

        def wrong(program: Program, sent: StagedLists) -> StepOutput:
            if harm.due(harm.exchange._step):
                program = replace(program, calls=change(program.calls))
            return true(program, sent)

        harm.put(programs, "_replay", wrong)

    return plant


def other_rows(calls: tuple[ScriptCall, ...]) -> tuple[ScriptCall, ...]:
    middle = len(calls) // 2
    other = calls[middle]._replace(rows=tuple(count + 1 for count in calls[middle].rows))
    return (*calls[:middle], other, *calls[middle + 1 :])


OF_CAPTURES: dict[str, Plant] = {
    "other plan, key": planned(other_key),
    "other sizes of programs": set_before(other_sizes),
    "captured nothing": set_before(captured_nothing),
    "lacks a program": set_before(lacks_a_program),
    "has a program more": set_before(a_program_more),
    "replays a shorter program": replayed(lambda calls: calls[:-1]),
    "replays a longer program": replayed(lambda calls: (*calls, calls[-1])),
    "replays other rows": replayed(other_rows),
    "a collective of a replay not entered": not_entered,
}
