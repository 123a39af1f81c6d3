"""Architectures read from configs; drafts that do not fit are refused with both numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.arch import DraftSpec, aux_boundaries, read_draft, read_target
from cluster.config import ConfigError, EngineConfig
from cluster.engine import build_engine
from cluster.models.checkpoint import Checkpoint
from cluster.spec.inputs import EagleDraftExtendInput, EagleDraftInput
from tests.loading import context, load_draft, load_target
from tests.tiny import draft_folder, target_folder
from tests.unit.models.checkpoints import Tensors, copy_of


def spec_in(folder: str, target: str | None = None) -> DraftSpec:
    return read_draft(folder, Checkpoint(folder).shapes, read_target(target or target_folder()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*known"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide 4"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn lacks.*factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3 lacks.*low_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a positive number, got 'x'"),
    ],
)
def test_a_target_that_is_not_served_is_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = copy_of(target_folder(), tmp_path / "target", **config)
    with pytest.raises(ConfigError, match=message) as caught:
        read_target(folder)
    assert folder in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\udcff"])
def test_a_bad_config_file_is_named(content: str | None, tmp_path: Path) -> None:
    folder = copy_of(target_folder(), tmp_path / "target")
    file = Path(folder) / "config.json"
    file.unlink() if content is None else file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_target(folder)
    with pytest.raises(ConfigError, match="does not exist"):
        read_target(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {"vocab_size": 65}, "vocab_size 65 against 64"),
        ({}, {"target_hidden_size": 48}, "target_hidden_size 48 against 32"),
        ({}, {"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2 but 3 aux layers are named"),
        (
            {},
            {"num_aux_hidden_states": 2, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
            r"fc\.weight is \[32, 96\] but 2 aux hidden states of 32 make it \[32, 64\]",
        ),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}}, r"\[1, 2, 6\].*0 to 4"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}}, "must ascend"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "must ascend"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "0, 1"}}, "must be a list of integers"),
        ({}, {"eagle_config": [0, 1, 2]}, "eagle_config must be an object"),
        ({}, {"hidden_size": 48}, "fc.weight|embed_tokens"),
        ({"own_head": False}, {"draft_vocab_size": 40}, "shares the target's head"),
        ({"use_aux": False, "hidden": 48}, {}, "its width is 48, the target's 32"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    options: dict[str, object], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = copy_of(draft_folder(target_folder(), **options), tmp_path / "draft", **config)
    with pytest.raises(ConfigError, match=message) as caught:
        spec_in(folder)
    assert folder in str(caught.value)


def test_a_draft_for_a_wider_target_is_refused() -> None:
    target, other = target_folder(), target_folder(hidden=48, layers=4)
    with pytest.raises(ConfigError, match="32 against 48"):
        spec_in(draft_folder(target), other)


def test_the_engine_refuses_it_too(tmp_path: Path) -> None:
    folder = copy_of(draft_folder(target_folder()), tmp_path / "draft", vocab_size=65)
    config = EngineConfig(
        model_path=target_folder(), speculative_algorithm="EAGLE3", speculative_draft_model_path=folder
    )
    with pytest.raises(ConfigError, match="vocab_size 65 against 64"):
        build_engine(config)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (2, 16, 29)),
        ({"num_aux_hidden_states": 3}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 32]}, (0, 32)),
        ({"num_aux_hidden_states": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [31]}}, (32,)),
        (
            {
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
                "eagle_aux_hidden_state_layer_ids": [5, 6, 7],
            },
            (2, 3),
        ),
    ],
)
def test_boundaries_are_resolved_once(keys: dict[str, object], expected: tuple[int, ...]) -> None:
    """Ids in `eagle_config` number outputs, so boundary id + 1; at the top level they number boundaries,
    unless they are EAGLE-3's own outputs.
    """
    assert aux_boundaries(keys, 32, "x") == expected


def test_a_head_without_aux_states_may_have_the_norm_and_the_fc_of_one_with_them(tmp_path: Path) -> None:
    """NVIDIA's heads for gpt-oss; the norm counts, the unused product does not."""
    target = target_folder()
    folder, more = draft_folder(target, use_aux=False), load_file(draft_folder(target) + "/model.safetensors")
    plain = load_draft(folder, load_target(target, context()), context())

    def change(held: Tensors) -> None:
        added = {name: more[name] for name in more if name.endswith(("hidden_norm.weight", "fc.weight"))}
        assert len(added) == 2 and not added.keys() & held.keys()
        held |= added

    other = load_draft(copy_of(folder, tmp_path / "normed", change), load_target(target, context()), context())
    assert (plain.spec.layers[0].hidden_norm, other.spec.layers[0].hidden_norm) == ("none", "hidden_norm")


@pytest.mark.parametrize(
    ("num_aux", "hidden", "use_aux"),
    [(n, hidden, True) for n in (1, 3, 5) for hidden in (None, 48)] + [(3, None, False)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_widths_have_one_source(num_aux: int, hidden: int | None, use_aux: bool, dtype: torch.dtype) -> None:
    spec = spec_in(draft_folder(target_folder(), num_aux=num_aux, hidden=hidden, use_aux=use_aux))
    recurrent, taken = hidden or 32, num_aux * 32 if use_aux else 32
    assert EagleDraftInput.hidden_size_for(spec) == spec.hidden == recurrent
    assert EagleDraftExtendInput.hidden_size_for(spec) == spec.fc_in == taken
    cpu = torch.device("cpu")
    for requests in (0, 3):
        idle = EagleDraftInput.create_idle_input(spec, 4, dtype, cpu, requests)
        assert idle.hidden.shape == (requests, recurrent)
        assert idle.hidden.dtype == EagleDraftInput.dtype_for(dtype) == dtype
        assert idle.topk_logprobs.shape == idle.topk_index.shape == (requests, 4)
        assert idle.topk_logprobs.dtype in (torch.float32, torch.float64), "log-probabilities are not rounded to half"
        assert idle.bonus.shape == (requests,)
    features = [torch.rand(6, 32).to(dtype) for _ in range(taken // 32)]
    for source in ([], [4, 0, 4]):
        hidden = EagleDraftExtendInput.hidden_of(spec, features, torch.tensor(source, dtype=torch.int64))
        assert torch.equal(hidden, torch.cat(features, 1)[source]) and hidden.shape[1] == taken
        assert hidden.dtype == EagleDraftExtendInput.dtype_for(dtype) == dtype
    with pytest.raises(ValueError, match=f"are {taken + 32} wide together, and the draft takes {taken}"):
        EagleDraftExtendInput.hidden_of(spec, [*features, features[0]], torch.tensor([1]))


def test_without_a_draft_there_is_no_width() -> None:
    assert EagleDraftInput.hidden_size_for(None) == EagleDraftExtendInput.hidden_size_for(None) == 0


def test_carriers_are_taken_and_put_by_row() -> None:
    spec = spec_in(draft_folder(target_folder()))
    table = EagleDraftInput.create_idle_input(spec, 2, torch.float64, torch.device("cpu"), 5)
    rows = torch.tensor([3, 1])
    new = EagleDraftInput(torch.rand(2, 2).double(), torch.randint(9, (2, 2)), torch.rand(2, 32).double(), rows + 40)
    table.put(rows, new)
    idle = EagleDraftInput.create_idle_input(spec, 2, torch.float64, torch.device("cpu"), 3)
    for name in ("topk_logprobs", "topk_index", "hidden", "bonus"):
        assert torch.equal(getattr(table.take(rows), name), getattr(new, name))
        assert torch.equal(getattr(table, name)[[0, 2, 4]], getattr(idle, name))
