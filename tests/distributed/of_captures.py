"""Planted divergences of captured programs: of their keys, of the programs that a rank has, of a program's calls."""

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
from tests.distributed.harm import FaultInjector, Plant, plant_before_agreement, plant_plan


def double_key_sizes(plan: StepPlan) -> StepPlan:
    """The plan with twice as many decodes: the key of the next larger program. An uncaptured plan stays as it is."""
    doubled_sizes = tuple(group_sizes._replace(decodes=2 * group_sizes.decodes) for group_sizes in plan.sizes)
    return plan._replace(sizes=doubled_sizes) if plan.captured else plan


def change_buckets(injector: FaultInjector) -> None:
    injector.coordinator._rule = replace(injector.coordinator._rule, buckets=Buckets((1, 2, 4, 8, 16, 64)))


def remove_all_programs(injector: FaultInjector) -> None:
    for key in injector.lockstep.programs.captured:
        injector.lockstep.programs.remove(key)


def remove_one_program(injector: FaultInjector) -> None:
    injector.lockstep.programs.remove(next(iter(injector.lockstep.programs.captured)))


def add_program(injector: FaultInjector) -> None:
    programs = injector.lockstep.programs
    key, program = next(iter(programs.captured.items()))
    programs.add(key._replace(mode=key.mode + SamplingMode.LOGPROBS), program)


def skip_gather_in_replay(injector: FaultInjector) -> None:
    """In a replay, return zeros in place of entering a gather over the world."""
    original = Axis.gather

    def gather(axis: Axis, rows: Tensor, counts: list[int]) -> Tensor:
        step, phase = injector.mesh.position
        if axis is injector.mesh.world and phase == "replay" and injector.triggers_at(step):
            return rows.new_zeros(sum(counts), *rows.shape[1:])
        return original(axis, rows, counts)

    injector.replace_attribute(Axis, "gather", gather)


def plant_replay(change: Callable[[tuple[ScriptCall, ...]], tuple[ScriptCall, ...]]) -> Plant:
    """A plant: the rank replays a program whose list of calls is `change(calls)`, as if captured for another script."""

    def plant(injector: FaultInjector) -> None:
        programs = injector.lockstep.programs
        original = programs._replay

        def replay_other_calls(program: Program, sent: StagedLists) -> StepOutput:
            if injector.triggers_at(injector.exchange._step):
                program = replace(program, calls=change(program.calls))
            return original(program, sent)

        injector.replace_attribute(programs, "_replay", replay_other_calls)

    return plant


def add_rows_to_middle_call(calls: tuple[ScriptCall, ...]) -> tuple[ScriptCall, ...]:
    """The calls, with one more row of each rank in the middle call."""
    middle = len(calls) // 2
    changed_call = calls[middle]._replace(rows=tuple(count + 1 for count in calls[middle].rows))
    return (*calls[:middle], changed_call, *calls[middle + 1 :])


CAPTURE_PLANTS: dict[str, Plant] = {
    "other plan, key": plant_plan(double_key_sizes),
    "other sizes of programs": plant_before_agreement(change_buckets),
    "captured nothing": plant_before_agreement(remove_all_programs),
    "lacks a program": plant_before_agreement(remove_one_program),
    "has a program more": plant_before_agreement(add_program),
    "replays a shorter program": plant_replay(lambda calls: calls[:-1]),
    "replays a longer program": plant_replay(lambda calls: (*calls, calls[-1])),
    "replays other rows": plant_replay(add_rows_to_middle_call),
    "a collective of a replay not entered": skip_gather_in_replay,
}
"""The plants by name; they need captured programs of several sizes."""
