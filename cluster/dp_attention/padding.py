"""Padding of an order to the planned rows. Idle rows are real rows on the sink page, so no phase has a special case.

An idle request uses the page table's last row, whose slots are all in the sink; its carriers, in the same row of the
table of carriers, come from `EagleDraftInput.create_idle_input`, so their widths are those of `hidden_size_for`.
"""

from cluster.batch import DecodeRequest, PromptChunk, StepInput
from cluster.dp_attention.plan import StepPlan


def padded(order: StepInput, plan: StepPlan, group: int, idle_row: int) -> StepInput:
    """`order` of attention group `group` with the idle requests, idle prompt rows and idle ends that the plan asks for.

    Idle requests come after the real ones. Each idle prompt row is a chunk of its own, so that it attends to nothing
    else; they come before the real chunks, because chunks are in order of length. In a captured step there is room for
    as many chunks as rows, so that their number is no part of its key.
    """
    requests, rows, finals = plan.idle(group)
    if plan.captured:
        order = order._replace(idle_finals=finals, chunk_places=plan.sizes[group].prompt_rows)
    if requests == 0 and rows == 0:
        return order
    idle = PromptChunk(idle_row, 0, 1, False, (0, 0))
    return order._replace(
        decodes=order.decodes + (DecodeRequest(idle_row, 0),) * requests, chunks=(idle,) * rows + order.chunks
    )
