"""An order arrives at a follower as it left its leader."""

from collections.abc import Iterator

from cluster.batch import (
    DecodeRequest,
    PageCopy,
    PageWrite,
    PromptChunk,
    RowGrammar,
    RowPenalties,
    RowSampling,
    SamplingMode,
    StepInput,
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
    writes=(PageWrite(3, 0, 12), PageWrite(1, -1, 0)),
    copies=(PageCopy(12, 14, 7), PageCopy(12, 15, 3)),
    mode=SamplingMode.RANDOM | SamplingMode.LOGPROBS,
)
PADDING = ("idle_finishing_prompts", "padded_chunks")
"""What padding to a plan adds: every rank of a group makes it of the same plan, so it does not travel."""


def test_pack_and_unpack_preserve_the_step_input() -> None:
    for order in (FULL, StepInput()):
        assert unpack(pack(order)) == order


def with_a_number_more(field: str) -> Iterator[StepInput]:
    """`FULL` with each number of its entries of `field` in turn one more."""
    entries = getattr(FULL, field)
    for at, entry in enumerate(entries):
        for key, number in enumerate(entry):
            if type(number) in (int, float):
                own = [*entry[:key], number + 1, *entry[key + 1 :]]
                changed = entry._make(own) if hasattr(entry, "_make") else tuple(own)
                yield FULL._replace(**{field: (*entries[:at], changed, *entries[at + 1 :])})


def test_step_input_checksum_covers_every_field() -> None:
    for field, default in StepInput()._asdict().items():
        if field not in PADDING:
            assert getattr(FULL, field) != default, field
            assert checksum(FULL._replace(**{field: default})) != checksum(FULL), field
            numbers = [] if field == "mode" else [*with_a_number_more(field)]
            assert field == "mode" or numbers, field
            assert checksum(FULL) not in map(checksum, numbers), field
