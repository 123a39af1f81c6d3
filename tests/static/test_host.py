"""What a step asks the host for and is sent by it. The lists may only become shorter."""

from collections import Counter

import pytest

from cluster.engine import build_engine
from cluster.request import Request
from tests.parity.harness import SAMPLING, config_of, tiny_pair
from tests.static.trap import Trap

ASKED: set[str] = set()
SENT: set[str] = set()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("topk", [1, 2])
def test_nothing_else_asks_the_host_or_is_sent_by_it(topk: int, sampling: str) -> None:
    target, draft = tiny_pair()
    engine = build_engine(config_of(target, draft, topk=topk))
    for i in range(5):
        engine.submit(Request(f"r{i}", tuple(1 + n % 20 for n in range(3 + 7 * i)), SAMPLING[sampling]))
    asked, sent, steps = Counter[str](), Counter[str](), 0
    while engine.has_work and steps < 30:
        with Trap() as trap:
            engine.step()
        asked, sent, steps = asked + trap.asked, sent + trap.sent, steps + 1
    assert set(asked) <= ASKED and set(sent) <= SENT, f"asked {asked}, sent {sent} in {steps} steps"
