"""`synthetic_acceptance`: accept lengths follow the given curve, whatever draft and target say."""

from collections import Counter
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
import torch

from cluster.config import ConfigError, EngineConfig
from cluster.engine import Engine, build_engine
from cluster.request import RequestParams
from cluster.spec.synthetic import SyntheticAccept
from cluster.spec.tree import NO_TOKEN
from tests.parity.harness import GREEDY, config_of, make_request, prompts, run, tiny_pair
from tests.parity.trees import adaptive
from tests.unit.spec.test_verify import random_tree

CHANCES = (0.9, 0.6, 0.5)


def engine_of(chances: tuple[float, ...], topk: int = 1, **settings: Any) -> Engine:
    return build_engine(config_of(*tiny_pair(), topk, 3, synthetic_acceptance=chances, **settings))


@pytest.mark.parametrize(("topk", "capture"), [(1, "off"), (3, "off"), (1, "on")])
def test_accept_lengths_follow_the_curve(topk: int, capture: str) -> None:
    requests = [
        make_request(f"r{i}", prompt, GREEDY, max_tokens=200, ignore_eos=True) for i, prompt in enumerate(prompts()[:4])
    ]
    nodes = {1: 4, 3: 22}[topk]  # all that three levels can propose, so that every tree is three levels deep
    lens = run(engine_of(CHANCES, topk, capture=capture, speculative_num_draft_tokens=nodes), requests).accept_lens
    reached = [sum(n > depth for n in lens) / len(lens) for depth in (1, 2, 3)]
    assert len(lens) > 250 and reached == pytest.approx(list(accumulate(CHANCES, mul)), abs=0.09)


def test_certain_and_impossible_tokens() -> None:
    requests = [make_request("r", prompts()[0], GREEDY, max_tokens=60, ignore_eos=True)]
    assert Counter(run(engine_of((1.0, 1.0)), requests).accept_lens).keys() <= {3, 2, 1}, "the curve ends at depth 2"
    assert set(run(engine_of((1.0, 1.0)), requests).accept_lens[:-1]) == {3}
    assert set(run(engine_of((0.0, 1.0)), requests).accept_lens) == {1}
    assert set(run(build_engine(adaptive(engine_of((1.0,)).info().config)), requests).tokens) == {"r"}


def test_paths_are_paths_of_the_tree_and_avoid_masked_nodes() -> None:
    tree = random_tree(40, 12, 4, 9, seed=1)
    tree.tokens[:, 7] = NO_TOKEN
    accepted = SyntheticAccept((0.9, 0.9, 0.9, 0.9), torch.device("cpu"))(
        tree, torch.full((40, 12), 77), torch.tensor([5]), 4
    )
    for i in range(40):
        count = int(accepted.accept_len[i])
        path = accepted.path[i, :count].tolist()
        assert path[0] == 0 and 7 not in path and set(accepted.path[i, count:].tolist()) <= {0}
        assert tree.parents[i, path[1:]].tolist() == path[:-1]
        assert accepted.tokens[i, :count].tolist() == [*tree.tokens[i, path[1:]].tolist(), 77]
    assert set(accepted.bonus.tolist()) == {77, 5} and accepted.accept_len.max() > 2


def test_settings_and_requests_that_do_not_go_with_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance must hold chances from 0 to 1"):
        config_of(*tiny_pair(), 1, 3, synthetic_acceptance=(1.5,))
    with pytest.raises(ValueError, match="synthetic_acceptance needs speculative_draft_model_path"):
        EngineConfig(model_path=tiny_pair()[0], synthetic_acceptance=(0.5,))
    params = RequestParams(temperature=0.0, max_tokens=4, grammar="root ::= [a-z]")
    with pytest.raises(ValueError, match="unset it"):
        engine_of((0.5,)).submit(make_request("g", prompts()[0], params))
