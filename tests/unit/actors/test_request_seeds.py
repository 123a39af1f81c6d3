"""What the router decides before it submits a request to a shard: the request's seed, and whether to admit it."""

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


def admitted_seeds(target: Router, *requested_seeds: int | None) -> list[int | None]:
    """Have a router admit one request for each of `requested_seeds` (None: no seed); return the requests' seeds."""
    requests = [Request(f"r{i}", (1, 2), RequestParams(seed=seed)) for i, seed in enumerate(requested_seeds)]
    return [target._admit(request).request.params.seed for request in requests]


def test_router_draws_the_same_request_seeds_for_the_same_random_seed() -> None:
    first, again = (admitted_seeds(router(random_seed=7), *[None] * 5) for _ in range(2))
    assert first == again
    assert len({*first}) == 5
    assert not {*first} & {*admitted_seeds(router(random_seed=8), *[None] * 5)}
    assert not {*first} & {*admitted_seeds(router(replica_rank=1, random_seed=7), *[None] * 5)}


def test_router_keeps_a_given_seed_and_draws_none_for_that_request() -> None:
    plain = admitted_seeds(router(), None, None)
    assert admitted_seeds(router(), None, 42, None) == [plain[0], 42, plain[1]]


def test_refused_request_draws_no_seed() -> None:
    full_router, free_router = router(max_queued_requests=1), router()
    (first,) = admitted_seeds(full_router, None)
    assert full_router.overload() is not None
    with pytest.raises(Overloaded, match="max_queued_requests is 1"):
        full_router._admit(Request("x", (1,), RequestParams()))
    full_router._forget(full_router._streams["r0"])
    assert full_router.overload() is None
    (second,) = admitted_seeds(full_router, None)
    assert [first, second] == admitted_seeds(free_router, None, None)
