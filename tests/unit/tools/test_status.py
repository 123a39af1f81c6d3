"""`ServerWatch` reads two pages of a server, /server_info and /metrics, and `lines_of` makes the lines of the table."""

import itertools
import json
from typing import Any

import pytest

from cluster.actors.messages import GangHistory, GangStatus, Heartbeat, Loss
from cluster.api.core.limits import ModelInfo, RequestLimits
from cluster.api.http.server_state import build_server_info
from cluster.chat.formats.choose import ChosenFormat
from cluster.observability.metrics import EngineMetrics, ServingMetrics, merge
from cluster.observability.step_stats import StepStats
from cluster.status import EngineStatus
from cluster.tools import server_state
from cluster.tools.client import NoAnswerError
from cluster.tools.server_state import GANG_MEMORY_S, ServerWatch
from cluster.tools.status import lines_of
from tests.support.rank_info import rank_info

STEP = StepStats(committed_tokens=5, drafts=2, accept_lens=[2, 3], accepted_by_depth=[2, 1])
LOSS = Loss(1, "died", 218, "target", "the process died", epoch=0, at=1_700_000_000.0, noticed_s=0.1, attempts=1)
HEARTBEAT = Heartbeat(
    0,
    steps=9,
    busy=True,
    idle_s=0.0,
    step=10,
    phase="draft",
    status=EngineStatus(running=2, waiting=1, accept_length=2.5, pages_free=6, pages_used=3, pages_cached=1),
)


def info(gang: str, reason: str = "", losses: tuple[Loss, ...] = ()) -> dict[str, Any]:
    ranks = tuple(rank_info(rank=rank, world=2) for rank in range(2))
    history = GangHistory(epoch=len(losses), restarts=losses, gang=gang)
    status = GangStatus(not reason, reason, 12, 2, history, ranks, (HEARTBEAT,))
    info_dict: dict[str, Any] = json.loads(
        json.dumps(build_server_info(ModelInfo("demo", 512, 64, 0), RequestLimits(), status, ChosenFormat(None)))
    )
    return info_dict


class FakeServerClient:
    """A fake client of a server; the test sets the contents of the two pages."""

    url = "http://there"

    def __init__(self) -> None:
        self.engine = EngineMetrics(model_name="m", rank=0)
        self.serving = ServingMetrics(model_name="m")
        self.info = info("a/b/one")

    def json(self, path: str) -> dict[str, Any]:
        assert path == "/server_info"
        return self.info

    def page(self, path: str) -> str:
        assert path == "/metrics"
        return merge([self.engine.serialize(), self.serving.serialize()]).decode()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(server_state.time, "monotonic", lambda: now[0])
    return now


def test_rates_are_computed_between_two_polls(clock: list[float]) -> None:
    pages = FakeServerClient()
    server_watch = ServerWatch(pages)  # type: ignore[arg-type]
    pages.engine.observe_step(STEP)
    first_poll = server_watch.poll()
    assert (first_poll["tokens_per_second"], first_poll["accept_length"]) == (None, None)
    clock[0] += 2.0
    pages.engine.observe_step(STEP)
    timer = pages.serving.on_start()
    pages.serving.on_start()
    timer.on_tokens(1)
    second_poll = server_watch.poll()
    assert (second_poll["tokens_per_second"], second_poll["accept_length"]) == (2.5, 2.5)
    assert (second_poll["streaming"], second_poll["waiting"], second_poll["losses"]) == (1, 1, 0)
    clock[0] += 1.0
    third_poll = server_watch.poll()
    assert (third_poll["tokens_per_second"], third_poll["accept_length"]) == (0.0, None)
    pages.engine = EngineMetrics(model_name="m", rank=0)  # a replica has ended, so the sum falls
    clock[0] += 1.0
    assert server_watch.poll()["tokens_per_second"] == 0.0


def test_alternating_gangs_are_shown_until_they_expire(clock: list[float]) -> None:
    pages = FakeServerClient()
    server_watch = ServerWatch(pages)  # type: ignore[arg-type]
    ages = []
    for name in itertools.chain(("two", "one"), itertools.repeat("one", int(GANG_MEMORY_S) + 1)):
        pages.info = info(f"a/b/{name}")
        ages.append({gang["gang"]: gang["age_s"] for gang in server_watch.poll()["gangs"]})
        clock[0] += 1.0
    assert ages[1] == {"a/b/one": 0.0, "a/b/two": 1.0}
    assert ages[-1] == {"a/b/one": 0.0}


def test_server_of_another_product_is_refused() -> None:
    pages = FakeServerClient()
    pages.info = {"vllm_config": ""}
    with pytest.raises(NoAnswerError, match="no server of Aerie's"):
        ServerWatch(pages).poll()  # type: ignore[arg-type]


def test_status_table_shows_rates_gangs_ranks_and_losses(clock: list[float]) -> None:
    pages = FakeServerClient()
    server_watch = ServerWatch(pages)  # type: ignore[arg-type]
    server_watch.poll()
    clock[0] += 2.0
    pages.engine.observe_step(STEP)
    pages.serving.on_loss(1, "died")
    long_reason = "rank 1 died at step 218, phase target: " + "the process died " * 9 + "(restarting)"
    pages.info = info("a/b/one", long_reason, (LOSS,))
    lines = lines_of(server_watch.poll())
    text = [line for line, _ in lines]
    assert text[1].split("   ") == [
        *("2.5 tokens/s", "accept length 2.50", "streaming 0", "waiting 0"),
        *("losses 1", "restarts 0", "resumed streams 0"),
    ]
    assert lines[3] == ("gang a/b/one, incarnation 1, 12 tokens queued: not serving", "red")
    at = next(i for i, line in enumerate(text) if line.startswith("rank"))
    assert " ".join(line.strip() for line in text[4:at]) == long_reason, "the full reason, over several lines"
    assert text[at + 1].split() == ["0", "busy", "10", "draft", "2", "1", "30%", "10%", "2.50"]
    assert text[at + 2].split() == ["1", "silent", *["-"] * 7]
    assert len({len(line) for line in text[at : at + 3]}) == 1, "the columns are aligned"
    assert text[at + 3] == "latest loss, 2023-11-14 22:13:20Z: rank 1 died at step 218; not back yet"
    pages.info = info("a/b/one")
    assert ("gang a/b/one, incarnation 0, 12 tokens queued: serving", "green") in lines_of(server_watch.poll())
