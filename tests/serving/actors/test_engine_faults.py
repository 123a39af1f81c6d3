"""A rank of the real engine is killed or frozen under 16 open streams: each stream gets its undisturbed tokens."""

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
from tests.serving.actors.gangs import left_behind, with_gang
from tests.serving.actors.test_faults import rank_pids_of, wait_until, wait_until_unhealthy
from tests.support.tiny_checkpoints import draft_folder, target_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

STREAMS = 16
AHEAD_FACTORY = "tests.serving.actors.ahead_engine:build"


def real_gang_spec(name: str, world: int = 2, attn_dp: int = 2, factory: str = FACTORY, **settings: object) -> GangSpec:
    target = target_folder()
    model_settings = {
        "model_path": target,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft_folder(target),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "dtype": "float64",
        "max_total_tokens": 8192,
        "num_threads": 1,
    }
    config = EngineConfig(**{**model_settings, "tp_size": world, "attn_dp_size": attn_dp, **settings})  # type: ignore[arg-type]
    return GangSpec(config, layout_of(world, bundle_per_worker={"CPU": 0.5}), gang_name("test", name), factory)


def make_requests(id_prefix: str, max_tokens: int) -> list[Request]:
    rng = random.Random(7)
    request_list = []
    for i in range(STREAMS):
        prompt = tuple(rng.randrange(3, 60) for _ in range(rng.randint(1, 40)))
        params = RequestParams(
            temperature=(0.0, 0.8)[i % 2],
            seed=rng.getrandbits(40),
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=1 if i % 4 == 0 else None,
            prompt_logprobs=i % 3 if i % 2 else None,
        )
        request_list.append(Request(f"{id_prefix}-{i}", prompt, params))
    return request_list


class StreamRecorder:
    """Reads one stream and keeps its tokens, its logprobs, its prompt logprobs and its last output."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.last: SequenceOutput | None = None

    async def read_all(self, router: Router, request: Request) -> "StreamRecorder":
        async for output in router.generate(request):
            self.tokens += output.token_ids
            self.logprobs += output.logprobs
            self.prompt_logprobs += output.prompt_logprobs
            self.last = output
        return self


@pytest.mark.parametrize(
    ("rank", "sent_signal", "world", "attn_dp", "factory"),
    [
        (0, signal.SIGKILL, 2, 2, FACTORY),
        (1, signal.SIGKILL, 2, 2, FACTORY),
        (1, signal.SIGKILL, 2, 1, FACTORY),
        (1, signal.SIGSTOP, 2, 2, FACTORY),
        (0, signal.SIGKILL, 2, 2, AHEAD_FACTORY),
        (1, signal.SIGKILL, 2, 1, AHEAD_FACTORY),
    ],
)
def test_streams_of_a_gang_that_loses_a_rank_get_the_undisturbed_tokens(
    rank: int, sent_signal: signal.Signals, world: int, attn_dp: int, factory: str
) -> None:
    """With `AHEAD_FACTORY`, the rank is lost while a step runs whose results nobody has read."""
    name = f"real-{rank}-{sent_signal.name}-{attn_dp}-{factory == AHEAD_FACTORY}"

    async def body(gang: Gang, router: Router) -> None:
        max_tokens = 120
        undisturbed = await asyncio.gather(
            *(StreamRecorder().read_all(router, request) for request in make_requests("calm", max_tokens))
        )
        disturbed = [StreamRecorder() for _ in range(STREAMS)]
        disturbed_requests = make_requests("stormy", max_tokens)
        tasks = [
            asyncio.create_task(reader.read_all(router, request))
            for reader, request in zip(disturbed, disturbed_requests, strict=True)
        ]
        await wait_until(lambda: all(len(reader.tokens) > 8 for reader in disturbed), 60)
        assert not any(reader.last and reader.last.finish_reason for reader in disturbed), (
            "a stream ended before the signal"
        )
        os.kill(rank_pids_of(gang)[rank], sent_signal)
        reason = await asyncio.wait_for(wait_until_unhealthy(router), 5)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        for sent_request, expected, actual in zip(disturbed_requests, undisturbed, disturbed, strict=True):
            has_prompt_logprobs = sent_request.params.prompt_logprobs is not None
            assert len(actual.prompt_logprobs) == (
                len(sent_request.prompt_token_ids) - 1 if has_prompt_logprobs else 0
            ), "prompt logprobs come once"
            assert [entry.logprob for entry in actual.prompt_logprobs] == pytest.approx(
                [e.logprob for e in expected.prompt_logprobs]
            )
            assert actual.last is not None and actual.last.finish_reason == "length", actual.last
            assert actual.tokens == expected.tokens
            assert [entry.token_id for entry in actual.logprobs] == [entry.token_id for entry in expected.logprobs]
            assert [entry.logprob for entry in actual.logprobs] == pytest.approx([e.logprob for e in expected.logprobs])
        (loss,) = gang.gang_errors
        assert (loss.rank, loss.kind) == (rank, "died" if sent_signal == signal.SIGKILL else "frozen"), reason
        assert loss.phase not in ("", "start", "join") and loss.step > 0
        assert loss.noticed_s < (1.0 if sent_signal == signal.SIGKILL else 7.0)
        assert loss.restored_s is not None and loss.restored_s < (20 if sent_signal == signal.SIGKILL else 25)
        print(f"{loss}; noticed after {loss.noticed_s:.2f} s, serving after {loss.restored_s:.1f} s")
        await wait_until(lambda: not router._streams)
        beats = (await router.status()).heartbeats
        assert all(beat.status.pages_used == 0 and beat.status.running == 0 for beat in beats), beats

    with_gang(real_gang_spec(name, world, attn_dp, factory), body)


def test_indivisible_tp_size_is_refused_and_leaves_no_actors() -> None:
    with pytest.raises(ConfigError, match="tp_size"):
        with_gang(real_gang_spec("unsplit", world=3, attn_dp=1), None)  # type: ignore[arg-type]
    assert left_behind("unsplit") == []
