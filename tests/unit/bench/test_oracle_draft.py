"""An oracle draft knows the target's next tokens: it reaches the requested accept length, and the output tokens are
those of plain decoding.
"""

import pytest
import torch

from cluster.bench.loaded import LoadedModels
from cluster.bench.oracle_draft import CountingTokens, OracleDraft, RecordedTokens, tree_template
from cluster.bench.random_models import PRESETS, RandomModel, write_pair
from cluster.config import EngineConfig
from cluster.engine import Engine
from tests.parity.harness import GREEDY, RunResult, config_of, make_request, run, tiny_pair

CPU = torch.device("cpu")
NEW_TOKENS = 150


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_pair(tmp_path_factory.mktemp("made"), PRESETS["tiny"], None, CPU)


def oracle_engine(config: EngineConfig, target_tokens: CountingTokens | RecordedTokens, accept_length: float) -> Engine:
    loaded = LoadedModels(config)
    engine, _ = loaded.engine(
        config, lambda draft, models: OracleDraft(draft, target_tokens, accept_length, loaded.vocab_size, CPU)
    )
    return engine


def run_prompts(engine: Engine, prompts: list[list[int]]) -> RunResult:
    return run(engine, [make_request(str(i), p, GREEDY, max_tokens=NEW_TOKENS, seed=i) for i, p in enumerate(prompts)])


@pytest.mark.parametrize(("topk", "steps", "nodes", "capture"), [(1, 3, None, "off"), (4, 4, 16, "on")])
@pytest.mark.parametrize("accept_length", [1.0, 2.4, 4.0])
def test_oracle_draft_reaches_the_requested_accept_length(
    accept_length: float, topk: int, steps: int, nodes: int | None, capture: str, random_model: RandomModel
) -> None:
    extra_settings = {"speculative_num_draft_tokens": nodes} if nodes else {}
    config = config_of(
        random_model.target, random_model.draft, topk, steps, dtype="float32", capture=capture, **extra_settings
    )
    vocab = PRESETS["tiny"]["vocab_size"]
    oracle_run = run_prompts(oracle_engine(config, CountingTokens(vocab), accept_length), [[5, 9, 300], [7]])
    assert oracle_run.tokens == {
        "0": [(301 + i) % vocab for i in range(NEW_TOKENS)],
        "1": list(range(8, 8 + NEW_TOKENS)),
    }
    assert sum(oracle_run.accept_lens[:-2]) / len(oracle_run.accept_lens[:-2]) == pytest.approx(accept_length, abs=0.2)


def test_oracle_draft_predicts_a_recorded_plain_decoding_text() -> None:
    target, draft = tiny_pair()
    prompts = [[3, 5, 2], [9, 4]]
    plain_run = run_prompts(LoadedModels(config_of(target)).engine(config_of(target))[0], prompts)
    full_texts = [[*prompt, *plain_run.tokens[str(i)]] for i, prompt in enumerate(prompts)]
    longest = max(map(len, full_texts))
    target_tokens = RecordedTokens(torch.tensor([text + [0] * (longest - len(text)) for text in full_texts]))
    oracle_run = run_prompts(oracle_engine(config_of(target, draft, 3, 3), target_tokens, 3.5), prompts)
    assert oracle_run.completions == plain_run.completions
    long_accept_lens = [length for length in oracle_run.accept_lens if length > 2]
    assert len(long_accept_lens) >= len(oracle_run.accept_lens) - 4, "a step accepts 3 or 4, unless its text ends"


@pytest.mark.parametrize(("steps", "nodes"), [(1, 2), (3, 4), (5, 32), (5, 4), (4, 16)])
def test_tree_template_is_a_valid_tree_with_one_full_path(steps: int, nodes: int) -> None:
    template = tree_template(steps, nodes, CPU)
    max_depth = min(steps, nodes - 1)
    assert (template.parents[1:] < torch.arange(1, nodes)).all() and template.parents[0] == 0
    assert (template.depths[1:] == template.depths[template.parents[1:]] + 1).all()
    assert template.depths.max() == max_depth and template.path.sum() == max_depth + 1
    assert (template.ancestors.sum(1) == template.depths + 1).all()
