import pytest
import torch

from cluster.bench.cases import acceptance
from cluster.bench.pair import ModelPair
from cluster.bench.runs import fixed_length_params, run_batch
from cluster.bench.watched import recording_engine
from cluster.engine import build_engine
from tests.support.tiny_checkpoints import draft_folder, target_folder

PROMPTS = [[(7 * i + 3 * j) % 60 + 2 for j in range(6)] for i in range(5)]
NEW_TOKENS = 24


@pytest.fixture
def pair() -> ModelPair:
    target = target_folder(spread=0.3)
    return ModelPair(target, draft_folder(target, draft_vocab=40), "float64", 1)


@pytest.mark.parametrize("by_probability", [False, True])
def test_recording_draft_keeps_tokens_and_records_every_depth_reached(pair: ModelPair, by_probability: bool) -> None:
    params = [fixed_length_params(NEW_TOKENS, 1.0, seed) for seed in range(len(PROMPTS))]
    engine, draft = recording_engine(pair.config(acceptance.CHAIN, len(PROMPTS)), by_probability)
    run = run_batch(engine, PROMPTS, params)
    unrecorded_run = run_batch(build_engine(pair.config(acceptance.CHAIN, len(PROMPTS))), PROMPTS, params)
    assert run.tokens == unrecorded_run.tokens
    assert by_probability or (run.steps, run.accepted_tokens) == (unrecorded_run.steps, unrecorded_run.accepted_tokens)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, run.tokens, strict=True)]
    reached_in_text = [r for r in draft.reached if r.position < len(texts[r.seed])]
    assert all(texts[r.seed][r.position] == r.token for r in reached_in_text)
    assert len([r for r in draft.reached if r.depth == 1]) == run.steps
    for reached_depth in draft.reached:
        best_token = (
            reached_depth.distribution.top_by_probability if by_probability else reached_depth.distribution.top_coupled
        )[0]
        assert reached_depth.proposed == best_token
        assert float(reached_depth.distribution.probabilities.sum()) == pytest.approx(1.0)
    hits = sum(r.proposed == r.token for r in draft.reached)
    assert run.accepted_tokens <= hits <= run.accepted_tokens + 5 * len(PROMPTS), "only a last step cuts hits off"
    deeper_positions = [(r.seed, r.position) for r in draft.reached if r.depth > 1]
    accepted = {(r.seed, r.position) for r in draft.reached if r.proposed == r.token}
    assert all((seed, position - 1) in accepted for seed, position in deeper_positions)


def test_acceptance_bound_is_the_overlap_of_draft_and_target(pair: ModelPair) -> None:
    engine, draft = recording_engine(pair.config(acceptance.CHAIN, 1))
    run = run_batch(engine, PROMPTS[:1], [fixed_length_params(NEW_TOKENS, 1.0, 0)])
    text = PROMPTS[0] + run.tokens[0]
    reached = [r for r in draft.reached if r.position < len(text)]

    class FakeTarget:
        """A target with the draft's probabilities, or with all probability on tokens that the draft cannot propose."""

        def __init__(self, agrees: bool) -> None:
            self.agrees = agrees

        def log_probabilities(self, texts: list[list[int]]) -> list[torch.Tensor]:
            probabilities = torch.zeros(len(texts[0]), 64)
            for r in reached:
                probabilities[r.position - 1, draft.ids] = r.distribution.probabilities.float()
            outside_draft = torch.ones(64, dtype=torch.bool).index_fill_(0, draft.ids, False).float()
            return [
                (probabilities if self.agrees else outside_draft.expand_as(probabilities) / outside_draft.sum()).log()
            ]

    assert acceptance.acceptance_bounds(reached, [text], FakeTarget(True), draft.ids) == pytest.approx(
        [1.0] * len(reached)
    )  # type: ignore[arg-type]
    assert acceptance.acceptance_bounds(reached, [text], FakeTarget(False), draft.ids) == [0.0] * len(reached)  # type: ignore[arg-type]


def test_acceptance_bench_reports_accept_lengths_and_identical_tokens(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelPair, "prompts", lambda self, count, length: PROMPTS[:count])
    result = acceptance.measure(pair, acceptance.Size(3, 6, 12), log_progress=lambda _: None)
    assert result["identical"] is True
    assert [(x["name"], x["temperature"]) for x in result["accept_lengths"]] == [
        ("chain of 5", 0.0),
        ("topk 4, 5 levels, 24 nodes", 0.0),
        ("chain of 5", 0.8),
        ("topk 4, 5 levels, 24 nodes", 0.8),
    ]
    assert all(1.0 <= x["accept_length"] <= 6.0 for x in result["accept_lengths"])
    report_text = acceptance.show(result)
    for expected_text in ("3.30", "goal 85%", "top-4 coupled", "same tokens as plain decoding: yes"):
        assert expected_text in report_text
