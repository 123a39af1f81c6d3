"""Architectures read from configs. The error about a draft that does not match its target names both numbers."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from cluster.arch import DraftSpec, aux_boundaries, read_draft, read_target
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint
from tests.support.loading import context, load_draft, load_target
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models.checkpoints import Tensors, copy_of


def spec_in(folder: str, target: str | None = None) -> DraftSpec:
    return read_draft(folder, Checkpoint(folder).shapes, read_target(target or target_folder()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": None}, "architectures"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide 4"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a positive number, got 'x'"),
    ],
)
def test_unsupported_target_config_is_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = copy_of(target_folder(), tmp_path / "target", **config)
    with pytest.raises(ConfigError, match=message) as caught:
        read_target(folder)
    assert folder in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\udcff"])
def test_missing_or_bad_config_file_is_named(content: str | None, tmp_path: Path) -> None:
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
        ({}, {"num_aux_hidden_states": 2, "eagle_config": {}}, "is 2 and no aux layers are named; only for 3"),
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
def test_draft_that_does_not_match_the_target_is_refused(
    options: dict[str, object], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = copy_of(draft_folder(target_folder(), **options), tmp_path / "draft", **config)
    with pytest.raises(ConfigError, match=message) as caught:
        spec_in(folder)
    assert folder in str(caught.value)


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
def test_aux_layer_ids_are_resolved_to_boundaries(keys: dict[str, object], expected: tuple[int, ...]) -> None:
    """An id in `eagle_config` is the number of a layer's output, which is boundary id + 1. An id at the top level is
    the number of a boundary, unless the ids are EAGLE-3's own outputs.
    """
    assert aux_boundaries(keys, 32, "x") == expected


def test_draft_without_aux_states_may_contain_hidden_norm_and_fc(tmp_path: Path) -> None:
    """NVIDIA's heads for gpt-oss contain both tensors. The draft uses `hidden_norm`; it does not need `fc`."""
    target = target_folder()
    folder, full_tensors = draft_folder(target, use_aux=False), load_file(draft_folder(target) + "/model.safetensors")
    draft_without_norm = load_draft(folder, load_target(target, context()), context())

    def change(tensors: Tensors) -> None:
        added = {
            name: full_tensors[name] for name in full_tensors if name.endswith(("hidden_norm.weight", "fc.weight"))
        }
        assert len(added) == 2 and not added.keys() & tensors.keys()
        tensors |= added

    draft_with_norm = load_draft(
        copy_of(folder, tmp_path / "normed", change), load_target(target, context()), context()
    )
    assert (draft_without_norm.spec.layers[0].hidden_norm, draft_with_norm.spec.layers[0].hidden_norm) == (
        "none",
        "hidden_norm",
    )
