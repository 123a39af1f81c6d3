"""Gangs that lose a rank: the loss names the rank at fault, the gang restarts, and every stream only pauses."""

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
from tests.distributed.gang import NOTICE_SLACK
from tests.serving.actors.counting_engine import (
    CRASH,
    CRASH_AFTER_FIRST_TOKENS,
    CRASH_ON_ADMISSION,
    OUT_OF_STEP,
    POISON,
    RANK_BASE,
    SEED_DEPENDENT,
    SLOW,
    SLOW_PHASES,
    token_at,
)
from tests.serving.actors.gangs import make_request, read_stream, spec, with_gang

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


async def wait_until(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition is still false after {within_s} s"
        await asyncio.sleep(0.02)


async def wait_until_unhealthy(router: Router) -> str:
    """Wait until the router reports that its gang is unhealthy, and return the reason."""
    while (status := await router.status()).healthy:
        await asyncio.sleep(0.05)
    return status.reason


def rank_pids_of(gang: Gang) -> list[int]:
    return [info.pid for info in gang.infos]


class CheckedStreams:
    """Open streams whose tokens are all checked.

    Half of the requests are slow. The tokens of the other half depend on a seed: the request's or the router's.
    """

    def __init__(self, router: Router, count: int, max_tokens: int) -> None:
        self.received_tokens: dict[str, list[int]] = {}
        self.last_outputs: dict[str, Any] = {}
        self.requests = []
        for i in range(count):
            kind = (SLOW, SEED_DEPENDENT)[i % 2]
            params = RequestParams(max_tokens=max_tokens, seed=i if i % 4 == 1 else None)
            self.requests.append(Request(f"c{i}", (kind, 1000 * i), params))
        self.tasks = [asyncio.create_task(self._read(router, request)) for request in self.requests]

    async def _read(self, router: Router, request: Request) -> None:
        tokens = self.received_tokens[request.request_id] = []
        async for output in router.generate(request):
            tokens += output.token_ids
            self.last_outputs[request.request_id] = output

    async def wait_for_tokens(self) -> None:
        """Wait until every stream has more than four tokens."""
        await wait_until(
            lambda: (
                len(self.received_tokens) == len(self.requests)
                and all(len(t) > 4 for t in self.received_tokens.values())
            )
        )

    async def check(self, within_s: float = 60.0) -> None:
        """Wait until every stream has ended, and compare its tokens with the expected ones."""
        await asyncio.wait_for(asyncio.gather(*self.tasks), within_s)
        for request in self.requests:
            tokens, last = self.received_tokens[request.request_id], self.last_outputs[request.request_id]
            assert last.finish_reason == "length", last
            assert len(tokens) == request.params.max_tokens
            if request.prompt_token_ids[0] == SEED_DEPENDENT and request.params.seed is None:
                seed = (tokens[0] - 17 * request.prompt_token_ids[-1]) % 800_000  # 31 * seed % 800_000
                expected = [
                    (seed + 17 * request.prompt_token_ids[-1] + index * index) % 800_000 for index in range(len(tokens))
                ]
            else:
                expected = [token_at(request, request.prompt_token_ids[-1], index) for index in range(len(tokens))]
            assert tokens == expected, request.request_id


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_reported_and_every_stream_continues(rank: int) -> None:
    reported_losses: list[Loss] = []

    async def body(gang: Gang, router: Router) -> None:
        gang._on_loss = reported_losses.append
        streams = CheckedStreams(router, 8, max_tokens=400)
        await streams.wait_for_tokens()
        pids_before = rank_pids_of(gang)
        steps = (await router.status()).heartbeats[0].steps
        os.kill(pids_before[rank], signal.SIGKILL)
        await asyncio.wait_for(wait_until_unhealthy(router), 1.5 * NOTICE_SLACK)
        await wait_until(lambda: reported_losses)
        reason = (await router.status()).reason
        assert reason.startswith(f"rank {rank} died at step ") and "restarting" in reason
        await streams.check()
        status = await router.status()
        assert status.healthy and status.running == 0 and status.queued_tokens == 0
        assert not set(rank_pids_of(gang)) & set(pids_before)
        (loss,) = status.history.restarts
        assert (loss.rank, loss.kind, loss.epoch, loss.attempts) == (rank, "died", 0, 1)
        assert loss.phase in ("plan", "draft", "target", "extend", "commit") and loss.step >= steps
        assert loss.noticed_s < 1.5 * NOTICE_SLACK
        assert loss.restored_s is not None and 0 < loss.restored_s < 20 * NOTICE_SLACK
        assert status.history.epoch == 1
        assert [loss.restored_s is None for loss in reported_losses] == [True, False]
        assert (
            reported_losses[1]
            == replace(reported_losses[0], restored_s=reported_losses[1].restored_s, attempts=1)
            == gang.gang_errors[0]
        )
        speculation = streams.last_outputs["c0"].speculation
        assert speculation is not None
        # Of the 200 outputs, the first output of each of the 2 incarnations ends a prompt. Each of the other 198 is a
        # tree of two tokens.
        assert (speculation.steps, speculation.accepted_tokens, speculation.drafted) == (198, 198, 594)

    with_gang(spec(f"killed-{rank}", world=2), body)


def test_gang_of_a_single_rank_restarts_and_new_requests_wait() -> None:
    async def body(gang: Gang, router: Router) -> None:
        streams = CheckedStreams(router, 4, max_tokens=200)
        await streams.wait_for_tokens()
        os.kill(rank_pids_of(gang)[0], signal.SIGKILL)
        await wait_until_unhealthy(router)
        tokens, last = await asyncio.wait_for(read_stream(router, make_request("new", 70)), 30)
        assert tokens == [71, 72, 73, 74, 75, 76] and last.finish_reason == "length"
        await streams.check()

    with_gang(spec("killed-alone"), body)


@pytest.mark.slow
def test_streams_survive_two_rank_losses_and_a_client_disconnect() -> None:
    async def body(gang: Gang, router: Router) -> None:
        streams = CheckedStreams(router, 6, max_tokens=500)
        disconnecting_task = asyncio.create_task(
            read_stream(router, make_request("leaver", SLOW, 1, max_tokens=100_000))
        )
        await streams.wait_for_tokens()
        os.kill(rank_pids_of(gang)[1], signal.SIGKILL)
        await wait_until(lambda: gang.gang_errors)
        disconnecting_task.cancel()
        await wait_until(lambda: not gang.unhealthy_reason())
        counts_before = {name: len(tokens) for name, tokens in streams.received_tokens.items()}
        await wait_until(
            lambda: all(len(tokens) > counts_before[name] for name, tokens in streams.received_tokens.items())
        )
        os.kill(rank_pids_of(gang)[0], signal.SIGKILL)
        await streams.check()
        assert [(loss.rank, loss.kind, loss.epoch) for loss in gang.gang_errors] == [(1, "died", 0), (0, "died", 1)]
        status = await router.status()
        assert status.heartbeats[0].status.running == 0 and status.running == 0

    with_gang(spec("killed-twice", world=2), body)


def test_idle_gang_restarts_after_losing_a_rank() -> None:
    async def body(gang: Gang, router: Router) -> None:
        assert (await read_stream(router, make_request("a", 1)))[0] == [2, 3, 4, 5, 6, 7]
        await wait_until(lambda: gang.heartbeats[0] is not None)
        os.kill(rank_pids_of(gang)[1], signal.SIGKILL)
        await wait_until(lambda: gang.gang_errors and not gang.unhealthy_reason(), 30)
        assert (await asyncio.wait_for(read_stream(router, make_request("b", 1)), 20))[0] == [2, 3, 4, 5, 6, 7]
        assert (gang.gang_errors[0].rank, gang.gang_errors[0].kind) == (1, "died")

    with_gang(spec("killed-asleep", world=2), body)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_frozen_rank_is_reported_by_the_watchdog_and_replaced(rank: int) -> None:
    async def body(gang: Gang, router: Router) -> None:
        streams = CheckedStreams(router, 4, max_tokens=400)
        await streams.wait_for_tokens()
        frozen_pid, frozen_at = rank_pids_of(gang)[rank], time.monotonic()
        os.kill(frozen_pid, signal.SIGSTOP)
        reason = await asyncio.wait_for(wait_until_unhealthy(router), 5 * NOTICE_SLACK)
        assert time.monotonic() - frozen_at < (2.0 + 0.8) * NOTICE_SLACK
        assert reason.startswith(f"rank {rank} frozen at step ") and "no heartbeat" in reason
        await streams.check(150)
        assert time.monotonic() - frozen_at < 30 * NOTICE_SLACK
        (loss,) = gang.gang_errors
        assert (loss.rank, loss.kind) == (rank, "frozen") and loss.restored_s is not None
        assert not psutil.pid_exists(frozen_pid)

    with_gang(spec(f"frozen-{rank}", world=2, watchdog_timeout_s=2.0), body)


def test_briefly_frozen_rank_is_not_replaced() -> None:
    async def body(gang: Gang, router: Router) -> None:
        streams = CheckedStreams(router, 4, max_tokens=300)
        await streams.wait_for_tokens()
        os.kill(rank_pids_of(gang)[1], signal.SIGSTOP)
        try:
            assert "rank 1 frozen" in await asyncio.wait_for(wait_until_unhealthy(router), 15)
        finally:
            os.kill(rank_pids_of(gang)[1], signal.SIGCONT)
        await streams.check()
        assert gang.gang_errors == [] and (await router.status()).healthy

    with_gang(spec("moment", world=2, watchdog_timeout_s=2.5), body)


def test_blocked_replica_process_does_not_blame_its_ranks() -> None:
    async def body(gang: Gang, router: Router) -> None:
        streams = CheckedStreams(router, 4, max_tokens=200)
        await streams.wait_for_tokens()
        gang.incarnation.request_heartbeats()  # type: ignore[union-attr]
        time.sleep(2.0)  # this process reads no heartbeat for longer than the limit for a frozen rank
        await streams.check()
        assert gang.gang_errors == []

    with_gang(spec("stood-still", world=2, watchdog_timeout_s=0.8), body)


@pytest.mark.slow
def test_a_slow_rank_is_not_killed() -> None:
    async def body(gang: Gang, router: Router) -> None:
        tokens, _ = await asyncio.wait_for(
            read_stream(router, make_request("slow", SLOW_PHASES, RANK_BASE + 1, 5, max_tokens=12)), 30
        )
        assert tokens == list(range(6, 18))
        assert gang.gang_errors == []

    # A step takes 1.6 s. A rank without progress is given up after three times the limit, which is 1.5 s.
    with_gang(spec("slow", world=2, watchdog_timeout_s=0.5), body)


@pytest.mark.parametrize(("trouble", "kind"), [(POISON, "failed"), (OUT_OF_STEP, "out_of_step")])
def test_loss_names_the_failing_rank_and_not_the_reporting_peers(trouble: int, kind: str) -> None:
    async def body(gang: Gang, router: Router) -> None:
        task = asyncio.create_task(
            read_stream(router, make_request("trouble", trouble, RANK_BASE + 1, 3, max_tokens=4))
        )
        await wait_until(lambda: gang.gang_errors)
        loss = gang.gang_errors[0]
        assert (loss.rank, loss.kind, loss.phase) == (1, kind, "target")
        task.cancel()
        await wait_until(lambda: not gang.unhealthy_reason(), 30)

    with_gang(spec(f"fails-{kind}", world=2), body)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [CRASH, CRASH_ON_ADMISSION, CRASH_AFTER_FIRST_TOKENS], ids=["crash", "on-admission", "after-first-tokens"]
)
def test_request_that_kills_the_gang_repeatedly_fails_and_others_continue(kind: int) -> None:
    async def body(gang: Gang, router: Router) -> None:
        streams = CheckedStreams(router, 6, max_tokens=600)
        await streams.wait_for_tokens()
        poison_request = make_request("poison", kind, RANK_BASE + 1, 3, max_tokens=600)
        if kind == CRASH_ON_ADMISSION:  # only the rank that admits the request dies, so send the request to rank 1
            poison_request = replace(poison_request, routed_dp_rank=1)
        tokens, last = await asyncio.wait_for(read_stream(router, poison_request), 90)
        # Two tokens in each of 4 incarnations, unless the process died before it had sent them.
        assert len(tokens) in ((2, 4, 6, 8) if kind == CRASH_AFTER_FIRST_TOKENS else (0,))
        assert last.finish_reason == "error"
        assert "poison was resumed 3 times and never went on" in (last.error or "")
        assert "rank 1 died" in (last.error or "")
        await streams.check(60)
        assert len(gang.gang_errors) == 4 and router.lost_reason == ""

    with_gang(spec(f"poison-{kind}", world=2), body)


def test_gang_that_cannot_restart_is_given_up_after_restart_timeout() -> None:
    async def body(gang: Gang, router: Router) -> None:
        task = asyncio.create_task(read_stream(router, make_request("long", SLOW, 1, max_tokens=100_000)))
        await wait_until(lambda: "long" in router._streams and router._streams["long"].sent_tokens)
        gang.spec = replace(gang.spec, config=gang.spec.config.model_copy(update={"model_path": "bad-on-0"}))
        killed_at = time.monotonic()
        os.kill(rank_pids_of(gang)[1], signal.SIGKILL)
        tokens, last = await asyncio.wait_for(task, 12)
        assert 5 < time.monotonic() - killed_at < 9
        assert last.finish_reason == "abort" and len(tokens) > 0
        assert "rank 1 died" in (last.error or "") and "restart_timeout_s 6" in (last.error or "")
        assert router.lost_reason == last.error and not (await router.status()).healthy
        with pytest.raises(Unavailable) as raised:
            await read_stream(router, make_request("later", 1))
        assert str(raised.value) == router.lost_reason

    with_gang(spec("given-up", world=2, restart_timeout_s=6), body)


def test_gang_is_given_up_after_incarnations_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incarnation that only begins requests does not count: on a broken machine the first step is also the last."""
    monkeypatch.setattr("cluster.actors.gang.MAX_FRUITLESS_INCARNATIONS", 2)

    async def body(gang: Gang, router: Router) -> None:
        await read_stream(router, make_request("well", 1))
        tasks = [
            asyncio.create_task(read_stream(router, make_request(f"broken-{i}", CRASH, RANK_BASE, 3))) for i in range(2)
        ]
        results = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert all(last.finish_reason == "abort" for _, last in results)
        assert "2 incarnations in a row served no request" in router.lost_reason and len(gang.gang_errors) == 3

    with_gang(spec("fruitless"), body)


def test_closing_during_a_gang_restart_leaves_no_process() -> None:
    rank_pids: list[int] = []

    async def body(gang: Gang, router: Router) -> None:
        rank_pids.extend(rank_pids_of(gang))
        task = asyncio.create_task(read_stream(router, make_request("long", SLOW, 1, max_tokens=100_000)))
        await wait_until(lambda: "long" in router._streams and router._streams["long"].sent_tokens)
        os.kill(rank_pids_of(gang)[0], signal.SIGKILL)
        await wait_until(lambda: gang.gang_errors)
        await asyncio.sleep(0.3)
        await router.close()
        _, last = await task
        assert last.error == "the server is shutting down"

    with_gang(spec("closing", world=2), body)
    deadline = time.monotonic() + 15  # a killed process takes a moment to disappear
    while any(psutil.pid_exists(pid) for pid in rank_pids):
        assert time.monotonic() < deadline, rank_pids
        time.sleep(0.05)


@pytest.mark.slow
def test_follower_ranks_get_no_requests_but_are_watched() -> None:
    async def body(gang: Gang, router: Router) -> None:
        streams = CheckedStreams(router, 6, max_tokens=300)
        await streams.wait_for_tokens()
        await gang.request_heartbeats(2.0)
        running = [beat.status.running for beat in gang.heartbeats if beat is not None]
        assert running == [3, 0, 3, 0]
        os.kill(rank_pids_of(gang)[3], signal.SIGKILL)
        await streams.check()
        assert [(loss.rank, loss.kind) for loss in gang.gang_errors] == [(3, "died")]

    with_gang(spec("followers", world=4, attn_dp_size=2), body)
