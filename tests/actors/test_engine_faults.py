"""Two ranks of the real engine, killed and frozen under 16 open streams: law 1 holds across the lives of a gang."""

import asyncio
import os
import random
import signal

import pytest

from cluster.actors.gang import Gang, GangSpec
from cluster.actors.peer_gangs import gang_name
from cluster.actors.placement import layout_of
from cluster.actors.router import Router
from cluster.actors.shard import FACTORY
from cluster.config import ConfigError, EngineConfig
from cluster.request import Request, RequestParams, SequenceOutput, TokenLogprob
from tests.actors.gangs import left_behind, with_gang
from tests.actors.test_faults import pids, unhealthy, until
from tests.tiny import draft_folder, target_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

STREAMS = 16
AHEAD = "tests.actors.ahead_engine:build"


def real(name: str, world: int = 2, attn_dp: int = 2, factory: str = FACTORY, **settings: object) -> GangSpec:
    target = target_folder()
    pair = {
        "model_path": target,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft_folder(target),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "dtype": "float64",
        "max_total_tokens": 8192,
        "num_threads": 1,
    }
    config = EngineConfig(**{**pair, "tp_size": world, "attn_dp_size": attn_dp, **settings})  # type: ignore[arg-type]
    return GangSpec(config, layout_of(world, bundle_per_worker={"CPU": 0.5}), gang_name("test", name), factory)


def requests(turn: str, max_tokens: int) -> list[Request]:
    dice = random.Random(7)
    made = []
    for i in range(STREAMS):
        prompt = tuple(dice.randrange(3, 60) for _ in range(dice.randint(1, 40)))
        params = RequestParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=dice.getrandbits(40),
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=1 if i % 4 == 0 else None,
            prompt_logprobs=i % 3 if i % 2 else None,
        )
        made.append(Request(f"{turn}-{i}", prompt, params))
    return made


class Read:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[TokenLogprob] = []
        self.last: SequenceOutput | None = None

    async def all(self, router: Router, request: Request) -> "Read":
        async for output in router.generate(request):
            self.tokens += output.token_ids
            self.logprobs += output.logprobs
            self.scores += output.prompt_logprobs
            self.last = output
        return self


@pytest.mark.parametrize(
    ("rank", "how", "world", "attn_dp", "factory"),
    [
        (0, signal.SIGKILL, 2, 2, FACTORY),
        (1, signal.SIGKILL, 2, 2, FACTORY),
        (1, signal.SIGKILL, 2, 1, FACTORY),
        (1, signal.SIGSTOP, 2, 2, FACTORY),
        (0, signal.SIGKILL, 2, 2, AHEAD),
        (1, signal.SIGKILL, 2, 1, AHEAD),
    ],
)
def test_streams_of_a_gang_that_loses_a_rank_get_the_undisturbed_tokens(
    rank: int, how: signal.Signals, world: int, attn_dp: int, factory: str
) -> None:
    """`AHEAD`: a step is under way whose results nobody has read."""
    name = f"real-{rank}-{how.name}-{attn_dp}-{factory == AHEAD}"

    async def body(gang: Gang, router: Router) -> None:
        tokens = 120
        calm = await asyncio.gather(*(Read().all(router, request) for request in requests("calm", tokens)))
        reads = [Read() for _ in range(STREAMS)]
        asked = requests("stormy", tokens)
        tasks = [asyncio.create_task(r.all(router, request)) for r, request in zip(reads, asked, strict=True)]
        await until(lambda: all(len(r.tokens) > 8 for r in reads), 60)
        assert not any(r.last and r.last.finish_reason for r in reads), "too late: some have ended"
        os.kill(pids(gang)[rank], how)
        reason = await asyncio.wait_for(unhealthy(router), 5)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        for one, was, now in zip(asked, calm, reads, strict=True):
            scored = one.params.prompt_logprobs is not None
            assert len(now.scores) == (len(one.prompt_token_ids) - 1 if scored else 0), "told once"
            assert [entry.logprob for entry in now.scores] == pytest.approx([e.logprob for e in was.scores])
            assert now.last is not None and now.last.finish_reason == "length", now.last
            assert now.tokens == was.tokens
            assert [entry.token_id for entry in now.logprobs] == [entry.token_id for entry in was.logprobs]
            assert [entry.logprob for entry in now.logprobs] == pytest.approx([e.logprob for e in was.logprobs])
        (loss,) = gang.gang_errors
        assert (loss.rank, loss.kind) == (rank, "died" if how == signal.SIGKILL else "frozen"), reason
        assert loss.phase not in ("", "start", "join") and loss.step > 0
        assert loss.noticed_s < (1.0 if how == signal.SIGKILL else 7.0)
        assert loss.restored_s is not None and loss.restored_s < (20 if how == signal.SIGKILL else 25)
        print(f"{loss}; noticed after {loss.noticed_s:.2f} s, serving after {loss.restored_s:.1f} s")
        await until(lambda: not router._streams)
        beats = (await router.status()).heartbeats
        assert all(beat.status.pages_used == 0 and beat.status.running == 0 for beat in beats), beats

    with_gang(real(name, world, attn_dp, factory), body)


def test_indivisible_tp_size_is_refused_and_leaves_no_actors() -> None:
    with pytest.raises(ConfigError, match="tp_size"):
        with_gang(real("unsplit", world=3, attn_dp=1), None)  # type: ignore[arg-type]
    assert left_behind("unsplit") == []
