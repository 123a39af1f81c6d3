"""Engines with adaptive trees whose tiers a test chooses, in place of measured costs and learned outlooks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from random import Random
from typing import Any
from unittest.mock import patch

from cluster.config import EngineConfig
from cluster.dp_attention.facts import TreeVote
from cluster.dp_attention.tree_times import TreeCosts
from cluster.engine import Engine

MANY_TOKENS = 1 << 30
"""An outlook that no other tier comes near."""


def adaptive(config: EngineConfig) -> EngineConfig:
    """Return `config` with adaptive trees."""
    return config.model_copy(update={"speculative_mode": "adaptive"})


def equal_costs(lockstep: Any, cache: Any, resolved: Any) -> TreeCosts:
    """Return made-up costs, in place of `measure_trees`: all trees take the same time."""
    return TreeCosts((1,), ((100,),) * len(resolved.tiers), (100,))


def engine_with_trees(build: Callable[[], Engine], tiers: Iterable[int]) -> Engine:
    """Return the engine that `build` makes, which must have adaptive trees. Its steps choose `tiers` one after another;
    after the last one, they choose the largest tree.
    """
    with patch("cluster.engine.build.measure_trees", equal_costs):
        engine = build()
    coordinator, outlook = engine._parts.lockstep.coordinator, engine._parts.scheduler.decode.outlook
    assert coordinator.tree_times is not None
    coordinator.use_costs(coordinator.tree_times.costs)  # trees do not wait for programs
    assert outlook is not None, "the trees are not adaptive"
    count = len(engine._parts.resolved.tiers)
    remaining: Iterator[int] = chain(tiers, repeat(count - 1))

    def vote(decodes: Sequence[object], max_tier: int) -> TreeVote:
        chosen = min(next(remaining), max_tier) if decodes else 0
        return TreeVote(max_tier, tuple(MANY_TOKENS * (tier == chosen) + len(decodes) for tier in range(count)))

    outlook.vote = vote  # type: ignore[method-assign]
    return engine


def engine_with_random_trees(build: Callable[[], Engine], seed: int) -> Engine:
    """Return the engine that `build` makes; each step chooses a random tier, every third time none."""
    random = Random(seed)
    return engine_with_trees(build, iter(lambda: random.choice((0, random.randrange(16), 64)), -1))
