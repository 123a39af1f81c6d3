"""Tests of the sample of a draft: one computed output that is stored beside the draft and checked on every load."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from cluster.arch.draft.sample import SAMPLE_FILE, read_sample
from cluster.arch.resolve import check_models
from cluster.cli import main
from cluster.config import ConfigError, EngineConfig
from cluster.engine import build_engine
from cluster.paths.checkout import CHECKOUT, DEMO_DRAFT, DEMO_TARGET, demo_path
from cluster.request import Request, RequestParams
from cluster.spec.inputs import EagleDraftInput
from cluster.tools.sample_draft import clearest_sample, sample_draft
from tests.support.tiny_checkpoints import draft_folder, target_folder


def pair(tmp_path: Path) -> tuple[str, str]:
    """Return the folder of a tiny target, and of a copy of its draft that the test may change."""
    target = target_folder()
    return target, str(shutil.copytree(draft_folder(target), tmp_path / "draft"))


def config(target: str, draft: str, **overrides: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "model_path": target, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft,
        "max_running_requests": 2, "max_total_tokens": 256, "num_threads": 1, "dtype": "float64", "device": "cpu",
        "speculative_mode": "fixed",
    }  # fmt: skip
    return EngineConfig.from_kwargs(defaults | overrides)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_draft_with_its_sample_loads_in_every_dtype(tmp_path: Path, dtype: str) -> None:
    target, draft = pair(tmp_path)
    assert main(["sample-draft", draft, "--target", target]) == 0
    engine = build_engine(config(target, draft, dtype=dtype))
    assert engine.status().steps == 0 and engine.status().pages_used == 0
    engine.check_pages()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_demo_draft_with_its_sample_loads_with_fp8_kv_cache(dtype: str) -> None:
    """FP8 changes the hidden state of the demo draft by more than the tolerance for float64 without FP8."""
    target, draft = demo_path(DEMO_TARGET, ""), demo_path(DEMO_DRAFT, "")
    build_engine(config(target, draft, dtype=dtype, kv_cache_dtype="fp8_e4m3"))


def test_sample_check_at_load_does_not_change_generation(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    texts = []
    for _ in range(2):
        engine = build_engine(config(target, draft))
        engine.submit(Request("a", (5, 6, 7, 8, 9), RequestParams(max_tokens=12, temperature=0.8, seed=3)))
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step().outputs:
                tokens += output.token_ids
                assert output.cached_tokens == 0
        texts.append((tokens, engine.status().accept_length, engine.status().steps))
        if not (Path(draft) / SAMPLE_FILE).exists():
            sample_draft(draft, target, "EAGLE3")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("overrides", [{"rope_layout": "interleaved"}, {"norm_before_residual": True}])
def test_sample_check_refuses_wrong_draft_overrides(tmp_path: Path, overrides: dict[str, object]) -> None:
    target, draft = pair(tmp_path)
    sample_draft(draft, target, "EAGLE3")
    with pytest.raises(ConfigError, match=rf"{SAMPLE_FILE}.*is off by.*speculative_draft_overrides"):
        build_engine(config(target, draft, speculative_draft_overrides=overrides))


@pytest.mark.parametrize(
    ("likely", "taken"), [({}, 24), ({22: 0.9}, 22), ({20: 0.6, 18: 0.9}, 20), ({13: 0.4}, 13), ({12: 0.9}, 24)]
)
def test_sample_is_taken_where_the_top_token_is_clearly_most_likely(likely: dict[int, float], taken: int) -> None:
    """If the top two tokens had equal probability, another CPU could swap them, and a correct draft would be refused.

    `likely` gives the probability of the top token after prompts of some lengths (0.3 after all others), `taken` the
    expected length of the sample.
    """

    def fake_draft_input(tokens: tuple[int, ...]) -> EagleDraftInput:
        draft_input = EagleDraftInput.create_idle_input(None, 1, torch.float32, torch.device("cpu"), 1)
        draft_input.topk_index[0, 0], draft_input.topk_logprobs[0, 0] = (
            len(tokens),
            math.log(likely.get(len(tokens), 0.3)),
        )
        return draft_input

    sample = clearest_sample(fake_draft_input, range(24))
    assert (len(sample.tokens), sample.token) == (taken, taken)
    assert sample.tokens == tuple(range(taken))


def test_top_token_of_the_demo_draft_sample_is_above_one_half() -> None:
    sample = read_sample(str(CHECKOUT / DEMO_DRAFT), 1 << 20, 256)
    assert sample is not None and sample.logprob > math.log(0.5)


def test_sample_check_works_with_a_token_map(tmp_path: Path) -> None:
    target = target_folder()
    draft = str(shutil.copytree(draft_folder(target, own_head=False), tmp_path / "draft"))
    sample_draft(draft, target, "EAGLE3")
    top_token = json.loads((Path(draft) / SAMPLE_FILE).read_text())["token"]
    token_map_file = tmp_path / "hot.json"
    token_map_file.write_text(json.dumps([token for token in range(64) if token != top_token]))
    build_engine(config(target, draft, speculative_token_map=str(token_map_file)))
    with pytest.raises(ConfigError, match="is off by"):
        wrong_overrides = {"rope_layout": "interleaved"}
        build_engine(
            config(
                target, draft, speculative_token_map=str(token_map_file), speculative_draft_overrides=wrong_overrides
            )
        )


def test_sample_check_refuses_another_target(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    sample_draft(draft, target, "EAGLE3")
    with pytest.raises(ConfigError, match="the target is another one"):
        build_engine(config(target_folder(kv_heads=4), draft))


@pytest.mark.parametrize("small", [{"context_length": 20}, {"max_total_tokens": 24, "page_size": 4}])
def test_sample_that_does_not_fit_is_skipped_with_a_log_message(
    tmp_path: Path, small: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair(tmp_path)
    sample_draft(draft, target, "EAGLE3")
    engine = build_engine(config(target, draft, **small))
    assert "is not checked: its 24 tokens" in caplog.text
    engine.check_pages()


def test_existing_sample_is_not_overwritten(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)
    sample_draft(draft, target, "EAGLE3")
    with pytest.raises(ConfigError, match="exists already; remove it"):
        sample_draft(draft, target, "EAGLE3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "tokens and token must be ids below the vocabulary's 64"),
        ({"tokens": [1, 64]}, "must be ids below"),
        ({"token": 64}, "must be ids below"),
        ({"token": None}, "must be ids below"),
        ({"logprob": 0.5}, "logprob must be a number of at most 0"),
        ({"logprob": "-1"}, "logprob must be a number"),
        ({"tokens": "abc"}, "tokens must be a list of integers"),
        ({"hidden": None}, "hidden must list numbers"),
        ({"hidden": [1.0] * 31}, "hidden must hold the draft's 32 numbers, got 31"),
        ({"hidden": [0.0] * 32}, "hidden must hold"),
        ({"hidden": [1.0] * 31 + [float("nan")]}, "hidden must list numbers"),
        ({"hidden": [1.0] * 31 + [True]}, "hidden must list numbers"),
    ],
)
def test_malformed_sample_is_refused_without_loading_the_models(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    target, draft = pair(tmp_path)
    sample_draft(draft, target, "EAGLE3")
    file = Path(draft) / SAMPLE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        check_models(config(target, draft))


def test_read_sample_returns_none_without_a_sample_file(tmp_path: Path) -> None:
    assert read_sample(pair(tmp_path)[1], 64, 32) is None
