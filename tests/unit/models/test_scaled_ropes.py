"""Scaled rotary embeddings, with config keys as in published checkpoints, against `transformers` in float64 with the
same config.
"""

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
from tests.parity.harness import GREEDY, config_of, make_request, run, speculative_engine
from tests.support.families import family_checkpoint, random_model
from tests.support.family_sizes import DYNAMIC, LINEAR, LLAMA3, SIZES, YARN
from tests.support.float64_transformers import Oracle, exact
from tests.support.tiny_checkpoints import draft_folder
from tests.unit.models.checkpoints import copy_of
from tests.unit.models.sharded import run_text
from tests.unit.models.test_targets import relative_error, text

ORIGINAL = "original_max_position_embeddings"


def without_keys(scaling: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in scaling.items() if key not in names}


def write_checkpoint(folder: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> tuple[str, Oracle]:
    """Write a checkpoint whose config.json lacks `rope_parameters`, as older ones do, and has the keys `config`.

    Return its folder and the oracle that `transformers` builds from that config.
    """
    model_class, config_class = (
        getattr(transformers, architecture),
        getattr(transformers, architecture.replace("ForCausalLM", "Config")),
    )
    sizes = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 64}
    with exact():
        random_model(model_class, config_class(**sizes)).save_pretrained(folder)
    data = json.loads((folder / "config.json").read_text())
    data.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(data | config))
    return str(folder), Oracle(random_model(model_class, config_class.from_pretrained(folder)))


CONFIGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": without_keys(YARN, ORIGINAL)},
    "yarn, length at top level": {"rope_scaling": without_keys(YARN, ORIGINAL), ORIGINAL: 16},
    "yarn, length at both levels": {"rope_scaling": YARN, ORIGINAL: 16},
    "yarn, factor from the ratio": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, old type key": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "llama3": {"rope_scaling": without_keys(LLAMA3, ORIGINAL)},
    "llama3, length at top level": {"rope_scaling": without_keys(LLAMA3, ORIGINAL), ORIGINAL: 24},
    "new spelling, llama3": {"rope_parameters": {**without_keys(LLAMA3, ORIGINAL), "rope_theta": 1e5}, ORIGINAL: 24},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rope_original_length_is_read_like_transformers(name: str, tmp_path: Path) -> None:
    folder, oracle = write_checkpoint(tmp_path / "target", **CONFIGS[name])
    tokens = text(3)
    logits, _ = oracle.forward(tokens)
    for ours, _ in run_text(folder, tokens, [60, 15], 1):
        assert relative_error(ours, logits) < 1e-9


def test_llama_4_query_scaling_starts_at_the_original_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    config_keys: dict[str, Any] = {
        "rope_parameters": {**scaling, "rope_theta": 1e4},
        ORIGINAL: 16,
        "sliding_window": None,
    }
    folder, oracle = write_checkpoint(tmp_path / "target", "Ministral3ForCausalLM", **config_keys)
    logits, _ = oracle.forward(tokens := text(3))
    for ours, _ in run_text(folder, tokens, [60, 15], 1):
        assert relative_error(ours, logits) < 1e-9


@pytest.mark.parametrize(
    ("family", "case", "config", "longest"),
    [
        ("llama", "dynamic rope", {"rope_parameters": {**LINEAR, "rope_theta": 1e4}}, 1024),
        ("llama", "dynamic rope", {"rope_parameters": {**LINEAR, "factor": 2.5, "rope_theta": 1e4}}, 640),
        ("llama", "dynamic rope", {"rope_parameters": {**DYNAMIC, "rope_theta": 1e4}}, 1024),
        ("llama", "dynamic rope", {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, 256),
        ("llama", "dynamic rope", {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 1024),
        ("llama", "dynamic rope", {"rope_parameters": None, "rope_scaling": None}, 256),
        ("gemma3", "linear global rope", {}, 256),  # as in vLLM: the config's length already includes the factor
    ],
)
def test_max_position_accounts_for_rope_scaling(
    family: str, case: str, config: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    assert (
        read_target(copy_of(family_checkpoint(family, case).folder, tmp_path / "target", **config)).max_position
        == longest
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic"}, r"rope_scaling dynamic lacks \['factor'\]"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "dynamic with alpha is not served"),
        ({"rope_type": "yarn"}, r"rope_scaling yarn lacks \['factor'\]"),
        (without_keys(LLAMA3, ORIGINAL, "low_freq_factor"), r"rope_scaling llama3 lacks \['low_freq_factor'\]"),
        ({"rope_type": "ntk", "factor": 2.0}, "rope_scaling type 'ntk' is not served"),
    ],
)
def test_incomplete_or_unsupported_rope_scaling_is_refused_by_name(
    scaling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config_keys = {"rope_parameters": {**scaling, "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=message):
        read_target(copy_of(family_checkpoint("llama", "dynamic rope").folder, tmp_path / "target", **config_keys))


@pytest.mark.parametrize(("scaling", "prompt_length"), [(LINEAR, 150), (DYNAMIC, 50), (DYNAMIC, 5)])
def test_generation_beyond_the_original_length_equals_transformers(
    scaling: dict[str, Any], prompt_length: int, tmp_path: Path
) -> None:
    """The scaling extends 64 positions to 256. Beyond 64, dynamic scaling changes with every token of a text."""
    folder, oracle = write_checkpoint(tmp_path / "target", rope_scaling=scaling)
    requests = [make_request("a", text(1, prompt_length), GREEDY, max_tokens=60, ignore_eos=True)]
    engine = build_engine(config_of(folder, chunked_prefill_size=16))
    assert engine.info().context_length == 256
    plain_tokens = run(engine, requests).tokens["a"]
    assert plain_tokens == oracle.greedy(text(1, prompt_length), 60)
    full_texts = {"a": [*text(1, prompt_length), *plain_tokens]}
    engine_with_draft = speculative_engine(config_of(folder, draft_folder(folder), 2, 3), "corrected", full_texts, 0.8)
    assert run(engine_with_draft, requests).tokens["a"] == plain_tokens


def test_context_length_beyond_max_position_is_served_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, oracle = write_checkpoint(tmp_path / "target")
    with caplog.at_level(logging.WARNING, logger="cluster.engine.build"):
        engine = build_engine(config_of(folder, context_length=200))
    assert "context_length 200 is beyond the 64 tokens that the target's config promises" in caplog.text
    result = run(engine, [make_request("a", text(1, 100), GREEDY, max_tokens=30, ignore_eos=True)])
    assert result.tokens["a"] == oracle.greedy(text(1, 100), 30)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="cluster.engine.build"):
        build_engine(config_of(folder, context_length=64))
    assert not caplog.text


def rotary_cosines(rope: Rope, dim: int, positions: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the cosines of all positions, computed in one piece."""
    inverse = frequencies(rope, dim) if dtype == torch.float64 else frequencies(rope, dim).float()
    half = (torch.arange(positions, dtype=inverse.dtype)[:, None] * inverse).cos()
    return torch.cat([half, half], -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extended_rotary_table_equals_a_table_computed_at_once(dtype: torch.dtype) -> None:
    positions = rotary.INITIAL_ROWS + 3 * rotary.ROWS_PER_EXTENSION + 77
    table = RotaryTable(Rope(1e4), 40, positions, dtype, torch.device("cpu"))
    expected = rotary_cosines(Rope(1e4), 40, positions, dtype)
    for position_count in (1, rotary.INITIAL_ROWS + 1, rotary.INITIAL_ROWS + 2, 10 * positions):
        table.prepare_positions(position_count)
        row_count = min(position_count, positions)
        assert torch.equal(table.angles_at(torch.arange(row_count)).cos[:, 0], expected[:row_count])


def test_rotary_tables_are_extended_before_the_step_that_reads_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables grow by a few rows at a time, with chunked prompts, draft trees and several requests."""
    folder = family_checkpoint("llama", "yarn").folder
    requests = [make_request(f"{n}", text(n, n), GREEDY, max_tokens=40, ignore_eos=True) for n in (3, 60, 130)]
    expected_tokens = run(build_engine(config_of(folder)), requests).tokens
    monkeypatch.setattr(rotary, "INITIAL_ROWS", 4)
    monkeypatch.setattr(rotary, "ROWS_PER_EXTENSION", 3)
    full_texts = {
        prompt_request.request_id: [*prompt_request.prompt_token_ids, *expected_tokens[prompt_request.request_id]]
        for prompt_request in requests
    }
    config = config_of(folder, draft_folder(folder), 3, 3, chunked_prefill_size=16)
    assert run(speculative_engine(config, "corrected", full_texts, 0.8), requests).tokens == expected_tokens
    assert run(build_engine(config_of(folder, chunked_prefill_size=16)), requests).tokens == expected_tokens


def test_unused_rotary_table_rows_take_no_memory() -> None:
    """The tables of four million positions have 4 GB, of which only a few megabytes are in memory."""
    table = RotaryTable(Rope(1e4), 128, 1 << 22, torch.float32, torch.device("cpu"))
    before = resident_bytes()
    table.prepare_positions(rotary.INITIAL_ROWS + 2 * rotary.ROWS_PER_EXTENSION)
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
