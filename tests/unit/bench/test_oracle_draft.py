"""A draft that is told the truth is accepted as far as asked, and tokens stay those of plain decoding."""

import pytest
import torch

from cluster.bench.loaded import LoadedModels
from cluster.bench.oracle_draft import CountingTokens, OracleDraft, RecordedTokens, tree_template
from cluster.bench.random_models import PRESETS, RandomModel, write_pair
from cluster.config import EngineConfig
from cluster.engine import Engine
from tests.parity.harness import GREEDY, Run, config_of, request, run, tiny_pair

CPU = torch.device("cpu")
NEW = 150


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_pair(tmp_path_factory.mktemp("made"), PRESETS["tiny"], None, CPU)


def told(config: EngineConfig, truth: CountingTokens | RecordedTokens, accept_length: float) -> Engine:
    loaded = LoadedModels(config)
    engine, _ = loaded.engine(
        config, lambda draft, models: OracleDraft(draft, truth, accept_length, loaded.vocab_size, CPU)
    )
    return engine


def texts(engine: Engine, prompts: list[list[int]]) -> Run:
    return run(engine, [request(str(i), p, GREEDY, max_tokens=NEW, seed=i) for i, p in enumerate(prompts)])


@pytest.mark.parametrize(("topk", "steps", "nodes", "capture"), [(1, 3, None, "off"), (4, 4, 16, "on")])
@pytest.mark.parametrize("accept_length", [1.0, 2.4, 4.0])
def test_oracle_draft_reaches_the_requested_accept_length(
    accept_length: float, topk: int, steps: int, nodes: int | None, capture: str, made: RandomModel
) -> None:
    more = {"speculative_num_draft_tokens": nodes} if nodes else {}
    config = config_of(made.target, made.draft, topk, steps, dtype="float32", capture=capture, **more)
    vocab = PRESETS["tiny"]["vocab_size"]
    given = texts(told(config, CountingTokens(vocab), accept_length), [[5, 9, 300], [7]])
    assert given.tokens == {"0": [(301 + i) % vocab for i in range(NEW)], "1": list(range(8, 8 + NEW))}
    assert sum(given.accept_lens[:-2]) / len(given.accept_lens[:-2]) == pytest.approx(accept_length, abs=0.2)


def test_oracle_draft_predicts_a_recorded_plain_decoding_text() -> None:
    target, draft = tiny_pair()
    prompts = [[3, 5, 2], [9, 4]]
    plain = texts(LoadedModels(config_of(target)).engine(config_of(target))[0], prompts)
    known = [[*prompt, *plain.tokens[str(i)]] for i, prompt in enumerate(prompts)]
    longest = max(map(len, known))
    truth = RecordedTokens(torch.tensor([text + [0] * (longest - len(text)) for text in known]))
    given = texts(told(config_of(target, draft, 3, 3), truth, 3.5), prompts)
    assert given.ended == plain.ended
    most = [length for length in given.accept_lens if length > 2]
    assert len(most) >= len(given.accept_lens) - 4, "but for the ends of texts each accepts 3 or 4"


@pytest.mark.parametrize(("steps", "nodes"), [(1, 2), (3, 4), (5, 32), (5, 4), (4, 16)])
def test_tree_template_is_a_valid_tree_with_one_full_path(steps: int, nodes: int) -> None:
    made = tree_template(steps, nodes, CPU)
    deepest = min(steps, nodes - 1)
    assert (made.parents[1:] < torch.arange(1, nodes)).all() and made.parents[0] == 0
    assert (made.depths[1:] == made.depths[made.parents[1:]] + 1).all()
    assert made.depths.max() == deepest and made.path.sum() == deepest + 1
    assert (made.ancestors.sum(1) == made.depths + 1).all()
