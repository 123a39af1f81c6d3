"""Scaled rotations as configs in the field write them, against `transformers` in float64 reading the same config."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.arch import read_target
from cluster.arch.rope import Rope
from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.models import rotary
from cluster.models.rotary import RotaryTable, frequencies
from tests.exact import Oracle, exact
from tests.families import DYNAMIC, LINEAR, LLAMA3, SIZES, YARN, made, random_model
from tests.parity.harness import GREEDY, config_of, request, run, speculative
from tests.tiny import draft_folder
from tests.unit.models.checkpoints import copy_of
from tests.unit.models.sharded import run_text
from tests.unit.models.test_targets import relative, text

ORIGINAL = "original_max_position_embeddings"


def without(scaling: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in scaling.items() if key not in names}


def written(to: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> tuple[str, Oracle]:
    """A checkpoint whose config.json is in the old spelling, with these keys, and what `transformers` reads of it."""
    kind, config_class = (
        getattr(transformers, architecture),
        getattr(transformers, architecture.replace("ForCausalLM", "Config")),
    )
    sizes = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 64}
    with exact():
        random_model(kind, config_class(**sizes)).save_pretrained(to)
    data = json.loads((to / "config.json").read_text())
    data.pop("rope_parameters")
    (to / "config.json").write_text(json.dumps(data | config))
    return str(to), Oracle(random_model(kind, config_class.from_pretrained(to)))


CONFIGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": without(YARN, ORIGINAL)},
    "yarn, at the top": {"rope_scaling": without(YARN, ORIGINAL), ORIGINAL: 16},
    "yarn, at the top and below": {"rope_scaling": YARN, ORIGINAL: 16},
    "yarn, factor by the ratio": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, old type key": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "llama3": {"rope_scaling": without(LLAMA3, ORIGINAL)},
    "llama3, at the top": {"rope_scaling": without(LLAMA3, ORIGINAL), ORIGINAL: 24},
    "new spelling, llama3": {"rope_parameters": {**without(LLAMA3, ORIGINAL), "rope_theta": 1e5}, ORIGINAL: 24},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rope_original_length_is_read_like_transformers(name: str, tmp_path: Path) -> None:
    folder, oracle = written(tmp_path / "target", **CONFIGS[name])
    tokens = text(3)
    logits, _ = oracle.forward(tokens)
    for ours, _ in run_text(folder, tokens, [60, 15], 1):
        assert relative(ours, logits) < 1e-9


def test_llama_4_query_scaling_starts_at_the_original_length(tmp_path: Path) -> None:
    growing = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    given: dict[str, Any] = {"rope_parameters": {**growing, "rope_theta": 1e4}, ORIGINAL: 16, "sliding_window": None}
    folder, oracle = written(tmp_path / "target", "Ministral3ForCausalLM", **given)
    logits, _ = oracle.forward(tokens := text(3))
    for ours, _ in run_text(folder, tokens, [60, 15], 1):
        assert relative(ours, logits) < 1e-9


@pytest.mark.parametrize(
    ("family", "case", "config", "longest"),
    [
        ("llama", "dynamic rope", {"rope_parameters": {**LINEAR, "rope_theta": 1e4}}, 1024),
        ("llama", "dynamic rope", {"rope_parameters": {**LINEAR, "factor": 2.5, "rope_theta": 1e4}}, 640),
        ("llama", "dynamic rope", {"rope_parameters": {**DYNAMIC, "rope_theta": 1e4}}, 1024),
        ("llama", "dynamic rope", {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, 256),
        ("llama", "dynamic rope", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 1024),
        ("llama", "dynamic rope", {"rope_parameters": None, "rope_scaling": None}, 256),
        ("gemma3", "linear global rope", {}, 256),  # as vLLM: its promise is already stretched
    ],
)
def test_max_position_accounts_for_rope_scaling(
    family: str, case: str, config: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    assert read_target(copy_of(made(family, case).folder, tmp_path / "target", **config)).max_position == longest


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic"}, r"rope_scaling dynamic lacks \['factor'\]"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "dynamic with alpha is not served"),
        ({"rope_type": "yarn"}, r"rope_scaling yarn lacks \['factor'\]"),
        (without(LLAMA3, ORIGINAL, "low_freq_factor"), r"rope_scaling llama3 lacks \['low_freq_factor'\]"),
        ({"rope_type": "ntk", "factor": 2.0}, "rope_scaling type 'ntk' is not served"),
    ],
)
def test_incomplete_or_unsupported_rope_scaling_is_refused_by_name(
    scaling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"rope_parameters": {**scaling, "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=message):
        read_target(copy_of(made("llama", "dynamic rope").folder, tmp_path / "target", **given))


@pytest.mark.parametrize(("scaling", "prompt"), [(LINEAR, 150), (DYNAMIC, 50), (DYNAMIC, 5)])
def test_generation_beyond_the_original_length_equals_transformers(
    scaling: dict[str, Any], prompt: int, tmp_path: Path
) -> None:
    """64 positions, stretched to 256. Beyond 64 dynamic scaling changes with every token of a text."""
    folder, oracle = written(tmp_path / "target", rope_scaling=scaling)
    asked = [request("a", text(1, prompt), GREEDY, max_tokens=60, ignore_eos=True)]
    engine = build_engine(config_of(folder, chunked_prefill_size=16))
    assert engine.info().context_length == 256
    plain = run(engine, asked).tokens["a"]
    assert plain == oracle.greedy(text(1, prompt), 60)
    truth = {"a": [*text(1, prompt), *plain]}
    fast = speculative(config_of(folder, draft_folder(folder), 2, 3), "corrected", truth, 0.8)
    assert run(fast, asked).tokens["a"] == plain


def test_context_length_beyond_max_position_is_served_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, oracle = written(tmp_path / "target")
    with caplog.at_level(logging.WARNING, logger="cluster.engine.build"):
        engine = build_engine(config_of(folder, context_length=200))
    assert "context_length 200 is beyond the 64 tokens that the target's config promises" in caplog.text
    result = run(engine, [request("a", text(1, 100), GREEDY, max_tokens=30, ignore_eos=True)])
    assert result.tokens["a"] == oracle.greedy(text(1, 100), 30)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="cluster.engine.build"):
        build_engine(config_of(folder, context_length=64))
    assert not caplog.text


def whole(rope: Rope, dim: int, positions: int, dtype: torch.dtype) -> torch.Tensor:
    """cos of all positions, computed at once."""
    inverse = frequencies(rope, dim) if dtype == torch.float64 else frequencies(rope, dim).float()
    half = (torch.arange(positions, dtype=inverse.dtype)[:, None] * inverse).cos()
    return torch.cat([half, half], -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extended_rotary_table_equals_a_table_computed_at_once(dtype: torch.dtype) -> None:
    positions = rotary.INITIAL_ROWS + 3 * rotary.ROWS_PER_EXTENSION + 77
    table = RotaryTable(Rope(1e4), 40, positions, dtype, torch.device("cpu"))
    expected = whole(Rope(1e4), 40, positions, dtype)
    for reach in (1, rotary.INITIAL_ROWS + 1, rotary.INITIAL_ROWS + 2, 10 * positions):
        table.prepare_positions(reach)
        known = min(reach, positions)
        assert torch.equal(table.angles_at(torch.arange(known)).cos[:, 0], expected[:known])


def test_rotary_tables_are_extended_before_the_step_that_reads_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, trees, several requests: every table grows by few rows at a time."""
    folder = made("llama", "yarn").folder
    asked = [request(f"{n}", text(n, n), GREEDY, max_tokens=40, ignore_eos=True) for n in (3, 60, 130)]
    texts = run(build_engine(config_of(folder)), asked).tokens
    monkeypatch.setattr(rotary, "INITIAL_ROWS", 4)
    monkeypatch.setattr(rotary, "ROWS_PER_EXTENSION", 3)
    truth = {one.request_id: [*one.prompt_token_ids, *texts[one.request_id]] for one in asked}
    config = config_of(folder, draft_folder(folder), 3, 3, chunked_prefill_size=16)
    assert run(speculative(config, "corrected", truth, 0.8), asked).tokens == texts
    assert run(build_engine(config_of(folder, chunked_prefill_size=16)), asked).tokens == texts


def test_unused_rotary_table_rows_take_no_memory() -> None:
    """Four million positions: 4 GB of tables, of which a few megabytes are there."""
    table = RotaryTable(Rope(1e4), 128, 1 << 22, torch.float32, torch.device("cpu"))
    before = resident()
    table.prepare_positions(rotary.INITIAL_ROWS + 2 * rotary.ROWS_PER_EXTENSION)
    assert resident() - before < 64 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
