"""Pads a step input to the sizes of the plan; `plan.py` decides how many rows each group runs.

Padding rows are called idle. They are computed like other rows, but read and write only page 0, the sink page, so they
cannot change the KV of a request.

An idle request uses the last row of the page table: all slots of that row are in the sink page. It also uses the last
row of the draft inputs, which begins with the values of `EagleDraftInput.create_idle_input`. Padded steps overwrite
that row; no real request reads it.
"""

from cluster.batch import DecodeRequest, PromptChunk, StepInput
from cluster.dp_attention.plan import StepPlan


def pad_step_input(step_input: StepInput, plan: StepPlan, group: int, idle_row: int) -> StepInput:
    """Return `step_input` of attention group `group` with padding, so that it has the sizes `plan.sizes[group]`. The
    padding, called idle, consists of requests, prompt rows and, in a captured step, entries for prompts that finish in
    this step.

    Idle requests come after the real ones. Each idle prompt row is a chunk of its own, so the row attends only to
    itself. Idle chunks come first, because chunks are in order of length. In a captured step `padded_chunks` is the
    number of prompt rows. The assembler pads the lists with one entry per chunk to that length, so that one captured
    program serves any number of chunks.
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
