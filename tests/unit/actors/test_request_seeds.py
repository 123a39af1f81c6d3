"""What the router decides before any shard hears of a request: seeds, and who is let in."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.actors.messages import Overloaded
from cluster.actors.router import Router
from cluster.config import EngineConfig
from cluster.request import Request, RequestParams


def router(replica_rank: int = 0, **settings: Any) -> Router:
    config = EngineConfig.model_validate({"model_path": "m", **settings})
    gang: Any = SimpleNamespace(spec=SimpleNamespace(config=config, leaders=(0,)), infos=[])
    return Router(gang, replica_rank=replica_rank)


def seeds(of: Router, *given: int | None) -> list[int | None]:
    """The seeds of requests that are admitted one after the other."""
    wanted = [Request(f"r{i}", (1, 2), RequestParams(seed=seed)) for i, seed in enumerate(given)]
    return [of._admit(request).request.params.seed for request in wanted]


def test_router_draws_the_same_request_seeds_for_the_same_random_seed() -> None:
    first, again = (seeds(router(random_seed=7), *[None] * 5) for _ in range(2))
    assert first == again
    assert len({*first}) == 5
    assert not {*first} & {*seeds(router(random_seed=8), *[None] * 5)}
    assert not {*first} & {*seeds(router(replica_rank=1, random_seed=7), *[None] * 5)}


def test_router_keeps_a_given_seed_and_draws_none_for_that_request() -> None:
    plain = seeds(router(), None, None)
    assert seeds(router(), None, 42, None) == [plain[0], 42, plain[1]]


def test_refused_request_draws_no_seed() -> None:
    full, free = router(max_queued_requests=1), router()
    (first,) = seeds(full, None)
    assert full.overload() is not None
    with pytest.raises(Overloaded, match="max_queued_requests is 1"):
        full._admit(Request("x", (1,), RequestParams()))
    full._forget(full._streams["r0"])
    assert full.overload() is None
    (second,) = seeds(full, None)
    assert [first, second] == seeds(free, None, None)
