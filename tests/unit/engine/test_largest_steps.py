"""The steps for which memory is measured at start are as large as any later step."""

import pytest

from cluster.arch.resolve import resolve_models
from cluster.batch import PromptChunk
from cluster.config import EngineConfig
from cluster.engine.workspace import largest_step_inputs
from tests.parity.harness import tiny_pair

CONTEXT = 40


def chunks_of_largest_steps(**settings: object) -> list[tuple[PromptChunk, ...]]:
    engine_config = EngineConfig.from_kwargs(
        {"model_path": tiny_pair()[0], "device": "cpu", "context_length": CONTEXT, "max_running_requests": 6} | settings
    )
    return [step_input.chunks for step_input in largest_step_inputs(resolve_models(engine_config))]


@pytest.mark.parametrize(("chunk_rows", "rows"), [(32, 32), (100, 100), (10_000, 6 * CONTEXT), (-1, CONTEXT)])
def test_largest_step_has_all_prompt_rows_that_several_short_prompts_may_have(chunk_rows: int, rows: int) -> None:
    """With -1 a step has as many prompt rows as the longest prompt."""
    *beside_decodes, finishing = chunks_of_largest_steps(chunked_prefill_size=chunk_rows)
    for chunks in beside_decodes:
        assert sum(chunk.stop - chunk.start for chunk in chunks) == rows
        assert all(0 <= chunk.start < chunk.stop <= CONTEXT for chunk in chunks)
        assert len({chunk.row for chunk in chunks}) == len(chunks) == -(-rows // CONTEXT)
    assert len(finishing) == 6 and sum(chunk.stop - chunk.start for chunk in finishing) <= rows
