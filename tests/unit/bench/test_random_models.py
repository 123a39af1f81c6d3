"""Random models have the sizes of real models, as many layers as fit in memory, and random weights."""

from pathlib import Path

import pytest
import torch

from cluster.arch import read_target
from cluster.arch.safetensors.tensors import count_parameters
from cluster.bench import random_models
from cluster.bench.random_models import COMMON_CONFIG, PRESETS, RandomNumbers, RandomSpan, generated_reads, write_pair
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-1b", 1.50), ("llama-8b", 8.03), ("qwen3-30b-a3b", 30.5), ("mla", 15.7)]
)
def test_model_presets_have_the_parameter_counts_of_their_namesakes(name: str, billions: float, tmp_path: Path) -> None:
    arch = random_models._write_config(tmp_path, COMMON_CONFIG | PRESETS[name])
    assert count_parameters(arch) / 1e9 == pytest.approx(billions, rel=0.01)


def test_random_model_weights_are_scaled_and_embedding_rows_unique(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_models, "PERIOD", 4099)
    random_model = write_pair(tmp_path, PRESETS["tiny"], None, CPU)
    checkpoint = Checkpoint(random_model.target)
    embed, head = checkpoint.tensor("embed_tokens.weight"), checkpoint.tensor("lm_head.weight")
    assert torch.allclose(head, embed.roll(1, 0) * embed.shape[1] ** -0.5, rtol=1e-6)
    assert embed.unique(dim=0).shape == embed.shape
    gate = checkpoint.tensor("layers.1.mlp.gate_proj.weight")
    assert float(gate.std()) == pytest.approx(gate.shape[1] ** -0.5, rel=0.05)
    assert (checkpoint.tensor("layers.0.input_layernorm.weight") == 1).all()
    assert not torch.equal(gate, checkpoint.tensor("layers.2.mlp.gate_proj.weight"))


def test_weights_generated_on_read_equal_the_written_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares every tensor of a target with experts and of its draft: the whole tensor, and a slice of its rows."""
    monkeypatch.setattr(random_models, "PERIOD", 4099)
    small = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 40000, "intermediate_size": 48, "head_dim": 8}
    preset = PRESETS["qwen3-30b-a3b"] | small | {"num_experts": 4, "moe_intermediate_size": 16}
    written = write_pair(tmp_path / "written", preset, None, CPU)
    generated = write_pair(tmp_path / "sown", preset, None, CPU, generate_on_read=True)
    for written_folder, generated_folder in ((written.target, generated.target), (written.draft, generated.draft)):
        written_checkpoint, generated_checkpoint = Checkpoint(written_folder), Checkpoint(generated_folder)
        assert written_checkpoint.shapes == generated_checkpoint.shapes and len(written_checkpoint.shapes) > 10
        for name in written_checkpoint.shapes:
            expected = written_checkpoint.tensor(name)
            with generated_reads(tmp_path / "sown", CPU):
                assert torch.equal(generated_checkpoint.tensor(name), expected), name
                if expected.dim() > 1:
                    assert torch.equal(generated_checkpoint.tensor(name, rows=(1, 3)), expected[1:3])
        matrix = "lm_head.weight"
        assert not Checkpoint(generated_folder).tensor(matrix).any(), "the file on the disk has only zeros"
        assert generated_checkpoint.finish() == []


def test_random_model_has_as_many_layers_as_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS["tiny"] | {"num_hidden_layers": 40}
    all_bytes = count_parameters(random_models._write_config(tmp_path / "all", COMMON_CONFIG | preset)) * 4
    layer_bytes = (
        all_bytes - count_parameters(random_models._write_config(tmp_path / "few", COMMON_CONFIG | PRESETS["tiny"])) * 4
    ) / 36
    monkeypatch.setattr(random_models, "free_memory", lambda: 2 * (all_bytes - 10.5 * layer_bytes))
    random_model = write_pair(tmp_path, preset, None, CPU)
    assert (random_model.layers, random_model.preset_layers) == (29, 40) and read_target(
        random_model.target
    ).num_layers == 29
    assert write_pair(tmp_path, preset, 5, CPU).layers == 5
    monkeypatch.setattr(random_models, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="not even 4 of 40 layers fit this machine"):
        write_pair(tmp_path, preset, None, CPU)


def test_unknown_shape_and_too_few_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the shapes are tiny, llama-1b"), random_models.random_model("llama-9b"):
        pass
    with pytest.raises(ConfigError, match="layers 3 are too few"):
        write_pair(tmp_path, PRESETS["tiny"], 3, CPU)


def test_random_numbers_repeat_periodically_past_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_models, "PERIOD", 7)
    random_numbers = RandomNumbers("float32")
    with (tmp_path / "numbers").open("wb") as file:
        random_numbers.write(file, RandomSpan(5, 20, 2.0))
    read_numbers = torch.frombuffer(bytearray((tmp_path / "numbers").read_bytes()), dtype=torch.float32)
    assert torch.equal(read_numbers, 2 * random_numbers._block[(5 + torch.arange(20)) % 7])
