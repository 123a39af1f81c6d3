"""An order arrives at a follower as it left its leader."""

from cluster.batch import Adjusting, Constraint, Decode, Mode, Order, PageCopy, PageWrite, PromptChunk, Sampling
from cluster.dp_attention.orders import checksum, pack, unpack

FULL = Order(
    decodes=(Decode(0, 9, 7), Decode(2, 4)),
    lens=((2, 3),),
    chunks=(PromptChunk(1, 0, 2, False, (4, 5, 6), 2), PromptChunk(3, 15, 18, True, (7, 8, 9))),
    samplings=(Sampling(3, 0.7, 5, 0.9, 0.01, 1 << 61),),
    adjustings=(
        Adjusting(3, 0.5, -0.25, 1.5, 2, 3, (4, 5, 6, 7), (1,), ((2, -100.0), (9, 0.5)), (2, 3), ((5, 6), (7,))),
        Adjusting(1, 0.0, 0.0, 1.0, 0, 1, (4,), (), (), None, ()),
    ),
    constraints=(Constraint(3, '{"é": "12345"}', (4, 5)), Constraint(2, "", ())),
    writes=(PageWrite(3, 0, 12), PageWrite(1, -1, 0)),
    copies=(PageCopy(12, 14, 7), PageCopy(12, 15, 3)),
    mode=Mode.NOISY | Mode.LOGPROBS,
)


def test_orders_travel_whole() -> None:
    for order in (FULL, Order()):
        assert unpack(pack(order)) == order


def test_the_checksum_tells_every_part() -> None:
    for field, value in Order()._asdict().items():
        assert checksum(FULL._replace(**{field: value})) != checksum(FULL) or getattr(FULL, field) == value, field
