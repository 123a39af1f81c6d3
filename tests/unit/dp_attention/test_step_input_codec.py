"""The codec of step inputs: a follower unpacks the step input that its leader packed, and the checksum covers it."""

from collections.abc import Iterator

from cluster.batch import (
    DecodeRequest,
    PageCopy,
    PageWrite,
    PromptChunk,
    RowGrammar,
    RowPenalties,
    RowSampling,
    RowTokens,
    SamplingMode,
    StepInput,
    WindowPageWrite,
)
from cluster.dp_attention.step_input_codec import checksum, pack, unpack

FULL = StepInput(
    decodes=(DecodeRequest(0, 9, 7), DecodeRequest(2, 4)),
    lens=((2, 3),),
    chunks=(PromptChunk(1, 0, 2, False, (4, 5, 6), 2), PromptChunk(3, 15, 18, True, (7, 8, 9))),
    samplings=(RowSampling(3, 0.7, 5, 0.9, 0.01, 1 << 61),),
    penalties=(
        RowPenalties(3, 0.5, -0.25, 1.5, 2, 3, (4, 5, 6, 7), (1,), ((2, -100.0), (9, 0.5)), (2, 3), ((5, 6), (7,))),
        RowPenalties(1, 0.0, 0.0, 1.0, 0, 1, (4,), (), (), None, ()),
    ),
    constraints=(RowGrammar(3, '{"é": "12345"}', (4, 5)), RowGrammar(2, "", ())),
    histories=(RowTokens(1, (7, 8, 9)), RowTokens(0, ())),
    writes=(PageWrite(3, 0, 12), PageWrite(1, -1, 0)),
    window_writes=(WindowPageWrite(12, 4), WindowPageWrite(9, 0)),
    copies=(PageCopy(12, 14, 7, 4, 6), PageCopy(12, 15, 3)),
    mode=SamplingMode.RANDOM | SamplingMode.LOGPROBS,
)
PADDING = ("idle_finishing_prompts", "padded_chunks")
"""Fields that padding to a plan sets. They are not sent, because every rank of a group pads to the same plan."""


def test_pack_and_unpack_preserve_the_step_input() -> None:
    for step_input in (FULL, StepInput()):
        assert unpack(pack(step_input)) == step_input


def with_incremented_numbers(field: str) -> Iterator[StepInput]:
    """Yield copies of `FULL`. In each copy, another one of the numbers in `field` is greater by one."""
    entries = getattr(FULL, field)
    for entry_index, entry in enumerate(entries):
        for number_index, number in enumerate(entry):
            if type(number) in (int, float):
                new_numbers = [*entry[:number_index], number + 1, *entry[number_index + 1 :]]
                changed = entry._make(new_numbers) if hasattr(entry, "_make") else tuple(new_numbers)
                yield FULL._replace(**{field: (*entries[:entry_index], changed, *entries[entry_index + 1 :])})


def test_step_input_checksum_covers_every_field() -> None:
    for field, default in StepInput()._asdict().items():
        if field not in PADDING:
            assert getattr(FULL, field) != default, field
            assert checksum(FULL._replace(**{field: default})) != checksum(FULL), field
            variants = [] if field == "mode" else [*with_incremented_numbers(field)]
            assert field == "mode" or variants, field
            assert checksum(FULL) not in map(checksum, variants), field
