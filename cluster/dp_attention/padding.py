"""Pads a step input to the rows of the plan; `plan.py` decides how many rows each group runs.

Idle rows are computed like others, on the sink page, so the step has no special case for them.

An idle request uses the last row of the page table, whose slots are all in the sink page, and the last row of the
carried draft inputs, which `EagleDraftInput.create_idle_input` made with the widths of `hidden_size_for`.
"""

from cluster.batch import DecodeRequest, PromptChunk, StepInput
from cluster.dp_attention.plan import StepPlan


def pad_step_input(step_input: StepInput, plan: StepPlan, group: int, idle_row: int) -> StepInput:
    """Return the step input `step_input` of attention group `group`, padded to `plan`: with idle requests, idle prompt
    rows, and idle entries for prompts that end.

    Idle requests come after the real ones. Each idle prompt row is a chunk of its own, so the row attends only to
    itself. Idle chunks come first, because chunks are in order of length. In a captured step the lists of chunks are
    padded to the number of prompt rows, so that the number of chunks is not part of the program's key.
    """
    requests, prompt_rows, finishing_prompts = plan.idle(group)
    if plan.captured:
        step_input = step_input._replace(
            idle_finishing_prompts=finishing_prompts, padded_chunks=plan.sizes[group].prompt_rows
        )
    if requests == 0 and prompt_rows == 0:
        return step_input
    idle_chunk = PromptChunk(idle_row, 0, 1, False, (0, 0))
    return step_input._replace(
        decodes=step_input.decodes + (DecodeRequest(idle_row, 0),) * requests,
        chunks=(idle_chunk,) * prompt_rows + step_input.chunks,
    )
