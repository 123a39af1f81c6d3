"""Gangs that lose ranks: the guilty one is named, the gang comes back, and no stream notices more than a pause."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil  # Ray's own copy: the actors' conftest imports Ray first
import pytest

from cluster.actors.gang import Gang
from cluster.actors.messages import Loss, Unavailable
from cluster.actors.router import Router
from cluster.request import Request, RequestParams
from tests.actors.counting_engine import ASTRAY, CRASH, CRAWL, LATE, NOISY, ON, POISON, SLOW, SUDDEN, token_at
from tests.actors.gangs import ask, read, spec, with_gang

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


async def until(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.02)


async def unhealthy(router: Router) -> str:
    while (status := await router.status()).healthy:
        await asyncio.sleep(0.05)
    return status.reason


def pids(gang: Gang) -> list[int]:
    return [info.pid for info in gang.infos]


class Crowd:
    """Streams that are checked to the token. Half are slow, half depend on a seed: their own or the router's."""

    def __init__(self, router: Router, count: int, max_tokens: int) -> None:
        self.sent: dict[str, list[int]] = {}
        self.last: dict[str, Any] = {}
        self.requests = []
        for i in range(count):
            kind = (SLOW, NOISY)[i % 2]
            params = RequestParams(max_tokens=max_tokens, seed=i if i % 4 == 1 else None)
            self.requests.append(Request(f"c{i}", (kind, 1000 * i), params))
        self.tasks = [asyncio.create_task(self._read(router, request)) for request in self.requests]

    async def _read(self, router: Router, request: Request) -> None:
        tokens = self.sent[request.request_id] = []
        async for output in router.generate(request):
            tokens += output.token_ids
            self.last[request.request_id] = output

    async def flowing(self) -> None:
        await until(lambda: len(self.sent) == len(self.requests) and all(len(t) > 4 for t in self.sent.values()))

    async def check(self, within_s: float = 60.0) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), within_s)
        for request in self.requests:
            tokens, last = self.sent[request.request_id], self.last[request.request_id]
            assert last.finish_reason == "length", last
            assert len(tokens) == request.params.max_tokens
            if request.prompt_token_ids[0] == NOISY and request.params.seed is None:
                seed = (tokens[0] - 17 * request.prompt_token_ids[-1]) % 800_000  # 31 times the seed, modulo
                expected = [(seed + 17 * request.prompt_token_ids[-1] + at * at) % 800_000 for at in range(len(tokens))]
            else:
                expected = [token_at(request, request.prompt_token_ids[-1], at) for at in range(len(tokens))]
            assert tokens == expected, request.request_id


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_reported_and_every_stream_continues(rank: int) -> None:
    heard: list[Loss] = []

    async def body(gang: Gang, router: Router) -> None:
        gang._on_loss = heard.append
        crowd = Crowd(router, 8, max_tokens=400)
        await crowd.flowing()
        killed = pids(gang)
        steps = (await router.status()).heartbeats[0].steps
        asked = time.monotonic()
        os.kill(killed[rank], signal.SIGKILL)
        reason = await asyncio.wait_for(unhealthy(router), 1.5)
        assert time.monotonic() - asked < 1.5
        await until(lambda: heard)
        reason = (await router.status()).reason
        assert reason.startswith(f"rank {rank} died at step ") and "restarting" in reason
        await crowd.check()
        status = await router.status()
        assert status.healthy and status.running == 0 and status.queued_tokens == 0
        assert not set(pids(gang)) & set(killed)
        (loss,) = status.history.restarts
        assert (loss.rank, loss.kind, loss.epoch, loss.attempts) == (rank, "died", 0, 1)
        assert loss.phase in ("plan", "draft", "target", "extend", "commit") and loss.step >= steps
        assert loss.noticed_s < 1.5 and loss.restored_s is not None and 0 < loss.restored_s < 20
        assert status.history.epoch == 1
        assert [loss.restored_s is None for loss in heard] == [True, False]
        assert heard[1] == replace(heard[0], restored_s=heard[1].restored_s, attempts=1) == gang.gang_errors[0]
        speculation = crowd.last["c0"].speculation
        assert speculation is not None
        # of 200 outputs the first of each life ends a prompt, and every other one is a tree of two tokens
        assert (speculation.steps, speculation.accepted_tokens, speculation.drafted) == (198, 198, 594)

    with_gang(spec(f"killed-{rank}", world=2), body)


def test_gang_of_a_single_rank_restarts_and_new_requests_wait() -> None:
    async def body(gang: Gang, router: Router) -> None:
        crowd = Crowd(router, 4, max_tokens=200)
        await crowd.flowing()
        os.kill(pids(gang)[0], signal.SIGKILL)
        await unhealthy(router)
        tokens, last = await asyncio.wait_for(read(router, ask("new", 70)), 30)
        assert tokens == [71, 72, 73, 74, 75, 76] and last.finish_reason == "length"
        await crowd.check()

    with_gang(spec("killed-alone"), body)


@pytest.mark.slow
def test_streams_survive_two_rank_losses_and_a_client_disconnect() -> None:
    async def body(gang: Gang, router: Router) -> None:
        crowd = Crowd(router, 6, max_tokens=500)
        leaver = asyncio.create_task(read(router, ask("leaver", SLOW, 1, max_tokens=100_000)))
        await crowd.flowing()
        os.kill(pids(gang)[1], signal.SIGKILL)
        await until(lambda: gang.gang_errors)
        leaver.cancel()
        await until(lambda: not gang.unhealthy_reason())
        now = {name: len(tokens) for name, tokens in crowd.sent.items()}
        await until(lambda: all(len(tokens) > now[name] for name, tokens in crowd.sent.items()))
        os.kill(pids(gang)[0], signal.SIGKILL)
        await crowd.check()
        assert [(loss.rank, loss.kind, loss.epoch) for loss in gang.gang_errors] == [(1, "died", 0), (0, "died", 1)]
        status = await router.status()
        assert status.heartbeats[0].status.running == 0 and status.running == 0

    with_gang(spec("killed-twice", world=2), body)


def test_idle_gang_restarts_after_losing_a_rank() -> None:
    async def body(gang: Gang, router: Router) -> None:
        assert (await read(router, ask("a", 1)))[0] == [2, 3, 4, 5, 6, 7]
        await until(lambda: gang.heartbeats[0] is not None)
        os.kill(pids(gang)[1], signal.SIGKILL)
        await until(lambda: gang.gang_errors and not gang.unhealthy_reason(), 30)
        assert (await asyncio.wait_for(read(router, ask("b", 1)), 20))[0] == [2, 3, 4, 5, 6, 7]
        assert (gang.gang_errors[0].rank, gang.gang_errors[0].kind) == (1, "died")

    with_gang(spec("killed-asleep", world=2), body)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_frozen_rank_is_reported_within_the_watchdog_limit_and_replaced(rank: int) -> None:
    async def body(gang: Gang, router: Router) -> None:
        crowd = Crowd(router, 4, max_tokens=400)
        await crowd.flowing()
        frozen, asked = pids(gang)[rank], time.monotonic()
        os.kill(frozen, signal.SIGSTOP)
        reason = await asyncio.wait_for(unhealthy(router), 5)
        assert time.monotonic() - asked < 2.0 + 0.8
        assert reason.startswith(f"rank {rank} frozen at step ") and "no heartbeat" in reason
        await crowd.check(40)
        assert time.monotonic() - asked < 30
        (loss,) = gang.gang_errors
        assert (loss.rank, loss.kind) == (rank, "frozen") and loss.restored_s is not None
        assert not psutil.pid_exists(frozen)

    with_gang(spec(f"frozen-{rank}", world=2, watchdog_timeout_s=2.0), body)


def test_briefly_frozen_rank_is_not_replaced() -> None:
    async def body(gang: Gang, router: Router) -> None:
        crowd = Crowd(router, 4, max_tokens=300)
        await crowd.flowing()
        os.kill(pids(gang)[1], signal.SIGSTOP)
        try:
            assert "rank 1 frozen" in await asyncio.wait_for(unhealthy(router), 5)
        finally:
            os.kill(pids(gang)[1], signal.SIGCONT)
        await crowd.check()
        assert gang.gang_errors == [] and (await router.status()).healthy

    with_gang(spec("moment", world=2, watchdog_timeout_s=1.5), body)


def test_blocked_replica_process_does_not_blame_its_ranks() -> None:
    async def body(gang: Gang, router: Router) -> None:
        crowd = Crowd(router, 4, max_tokens=200)
        await crowd.flowing()
        gang.incarnation.request_heartbeats()  # type: ignore[union-attr]
        time.sleep(2.0)  # this process hears nobody for longer than a frozen rank is given
        await crowd.check()
        assert gang.gang_errors == []

    with_gang(spec("stood-still", world=2, watchdog_timeout_s=0.8), body)


@pytest.mark.slow
def test_a_slow_rank_is_not_killed() -> None:
    async def body(gang: Gang, router: Router) -> None:
        tokens, _ = await asyncio.wait_for(read(router, ask("slow", CRAWL, ON + 1, 5, max_tokens=12)), 30)
        assert tokens == list(range(6, 18))
        assert gang.gang_errors == []

    # a step takes 1.6 s, which is more than the three limits after which a rank that does not move is given up
    with_gang(spec("slow", world=2, watchdog_timeout_s=0.5), body)


@pytest.mark.parametrize(("trouble", "kind"), [(POISON, "failed"), (ASTRAY, "out_of_step")])
def test_loss_names_the_failing_rank_and_not_the_reporting_peers(trouble: int, kind: str) -> None:
    async def body(gang: Gang, router: Router) -> None:
        task = asyncio.create_task(read(router, ask("trouble", trouble, ON + 1, 3, max_tokens=4)))
        await until(lambda: gang.gang_errors)
        loss = gang.gang_errors[0]
        assert (loss.rank, loss.kind, loss.phase) == (1, kind, "target")
        task.cancel()
        await until(lambda: not gang.unhealthy_reason(), 30)

    with_gang(spec(f"fails-{kind}", world=2), body)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CRASH, SUDDEN, LATE])
def test_request_that_kills_the_gang_repeatedly_fails_and_others_continue(kind: int) -> None:
    async def body(gang: Gang, router: Router) -> None:
        crowd = Crowd(router, 6, max_tokens=600)
        await crowd.flowing()
        poison = ask("poison", kind, ON + 1, 3, max_tokens=600)
        if kind == SUDDEN:  # dies where it is admitted
            poison = replace(poison, routed_dp_rank=1)
        tokens, last = await asyncio.wait_for(read(router, poison), 90)
        assert len(tokens) == (8 if kind == LATE else 0), "two in each of four lives"
        assert last.finish_reason == "error"
        assert "poison was resumed 3 times and never went on" in (last.error or "")
        assert "rank 1 died" in (last.error or "")
        await crowd.check(60)
        assert len(gang.gang_errors) == 4 and router.lost_reason == ""

    with_gang(spec(f"poison-{kind}", world=2), body)


def test_gang_that_cannot_restart_is_given_up_after_restart_timeout() -> None:
    async def body(gang: Gang, router: Router) -> None:
        task = asyncio.create_task(read(router, ask("long", SLOW, 1, max_tokens=100_000)))
        await until(lambda: "long" in router._streams and router._streams["long"].sent_tokens)
        gang.spec = replace(gang.spec, config=gang.spec.config.model_copy(update={"model_path": "bad-on-0"}))
        asked = time.monotonic()
        os.kill(pids(gang)[1], signal.SIGKILL)
        tokens, last = await asyncio.wait_for(task, 12)
        assert 5 < time.monotonic() - asked < 9
        assert last.finish_reason == "abort" and len(tokens) > 0
        assert "rank 1 died" in (last.error or "") and "restart_timeout_s 6" in (last.error or "")
        assert router.lost_reason == last.error and not (await router.status()).healthy
        with pytest.raises(Unavailable) as refused:
            await read(router, ask("later", 1))
        assert str(refused.value) == router.lost_reason

    with_gang(spec("given-up", world=2, restart_timeout_s=6), body)


def test_gang_is_given_up_after_incarnations_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they begin requests does not count: on a broken machine each life's first step is its last."""
    monkeypatch.setattr("cluster.actors.gang.MAX_FRUITLESS_INCARNATIONS", 2)

    async def body(gang: Gang, router: Router) -> None:
        await read(router, ask("well", 1))
        reading = [asyncio.create_task(read(router, ask(f"broken-{i}", CRASH, ON, 3))) for i in range(2)]
        ends = await asyncio.wait_for(asyncio.gather(*reading), 60)
        assert all(last.finish_reason == "abort" for _, last in ends)
        assert "2 incarnations in a row served no request" in router.lost_reason and len(gang.gang_errors) == 3

    with_gang(spec("fruitless"), body)


def test_closing_during_a_gang_restart_leaves_no_process() -> None:
    started: list[int] = []

    async def body(gang: Gang, router: Router) -> None:
        started.extend(pids(gang))
        task = asyncio.create_task(read(router, ask("long", SLOW, 1, max_tokens=100_000)))
        await until(lambda: "long" in router._streams and router._streams["long"].sent_tokens)
        os.kill(pids(gang)[0], signal.SIGKILL)
        await until(lambda: gang.gang_errors)
        await asyncio.sleep(0.3)
        await router.close()
        _, last = await task
        assert last.error == "the server is shutting down"

    with_gang(spec("closing", world=2), body)
    assert not any(psutil.pid_exists(pid) for pid in started)


@pytest.mark.slow
def test_follower_ranks_get_no_requests_but_are_watched() -> None:
    async def body(gang: Gang, router: Router) -> None:
        crowd = Crowd(router, 6, max_tokens=300)
        await crowd.flowing()
        await gang.request_heartbeats(2.0)
        running = [beat.status.running for beat in gang.heartbeats if beat is not None]
        assert running == [3, 0, 3, 0]
        os.kill(pids(gang)[3], signal.SIGKILL)
        await crowd.check()
        assert [(loss.rank, loss.kind) for loss in gang.gang_errors] == [(3, "died")]

    with_gang(spec("followers", world=4, attn_dp_size=2), body)
