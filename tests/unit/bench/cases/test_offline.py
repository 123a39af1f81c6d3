import pytest

from cluster.bench.cases import offline
from cluster.bench.pair import ModelPair, TreeChoice
from tests.support.tiny_checkpoints import draft_folder, target_folder

SIZE = offline.Size(prompts=9, single_prompts=2, prompt_tokens=6, new_tokens=10, repeats=2)
SHAPES = (TreeChoice(2), TreeChoice(2, 4, 8))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> ModelPair:
    def prompts(self: ModelPair, count: int, length: int) -> list[list[int]]:
        return [[(7 * i + 3 * j) % 60 + 2 for j in range(length)] for i in range(count)]

    monkeypatch.setattr(ModelPair, "prompts", prompts)
    target = target_folder()
    return ModelPair(target, draft_folder(target, draft_vocab=40), "float64", 1)


def test_contenders_generate_equal_token_counts_and_report_matches_their_runs(pair: ModelPair) -> None:
    contenders = offline.run_contenders(pair, SIZE, SHAPES, log_progress=lambda _: None)
    assert list(contenders) == ["plain", "chain of 2", "topk 4, 2 levels, 8 nodes", "transformers"]
    for contender in contenders.values():
        assert {batch: len(runs) for batch, runs in contender.runs.items()} == {1: 2, 8: 2}
        for batch, texts in ((1, SIZE.single_prompts), (8, SIZE.prompts)):
            for run in contender.runs[batch]:
                assert [len(tokens) for tokens in run.tokens] == [SIZE.new_tokens] * texts
                assert 0 <= run.forward_seconds < run.seconds
    result = offline.report(pair, SIZE, SHAPES, contenders)
    assert result["identical"] is True
    for setting in result["settings"][1:]:
        run = contenders[setting["name"]].runs[8][0]
        committed = SIZE.prompts * (SIZE.new_tokens - 1)  # the first token of each comes with its prompt
        assert setting["accept_length"] == pytest.approx(committed / run.steps)
        assert 0 < setting["batch_8"]["outside_share"] < 1
    assert result["settings"][0]["batch_1"]["speedup"] == 1.0
    assert result["best"]["overall"] in {str(shape) for shape in SHAPES}
    for batch, texts in (("batch_1", 2), ("batch_8", 9)):
        figures = result["against_transformers"][batch]
        assert (figures["same_texts"], figures["texts"]) == (texts, texts)
    report_text = offline.show(result)
    for expected_text in ("goal 1.6x", "goal 1.2x", "goal under 15%", "chain of 2", "transformers", "shipped default"):
        assert expected_text in report_text


def test_offline_report_flags_different_tokens_with_first_position(pair: ModelPair) -> None:
    contenders = offline.run_contenders(pair, SIZE, SHAPES[:1], log_progress=lambda _: None)
    contenders["chain of 2"].runs[8][1].tokens[3][4] += 1
    result = offline.report(pair, SIZE, SHAPES[:1], contenders)
    assert result["identical"] is False
    assert result["settings"][1]["first_difference"] == 4


def test_speedup_is_the_median_of_ratios_per_repeat() -> None:
    def contender(*speeds: float) -> offline.Contender:
        runs = [offline.EngineRun([[0] * 10], 10 / speed) for speed in speeds]
        return offline.Contender("x", lambda prompts: runs[0], {1: runs})

    fast, slow = contender(20, 4, 60), contender(10, 2, 20)
    assert fast.speed(1) == 20
    assert fast.speedup_over(slow, 1) == 2
