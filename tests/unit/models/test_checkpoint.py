"""Loading accounts for every tensor, and an error names the wrong tensor and its file (law 5)."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.arch.safetensors.stored import stored_shapes
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint
from cluster.models.eagle3 import Eagle3Draft
from cluster.models.target import DecoderTarget
from tests.support.loading import context, load_draft, load_target
from tests.support.published_formats import split_checkpoint
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models.checkpoints import Tensors, copy_of


def target_in(folder: str) -> DecoderTarget:
    return load_target(folder, context())


def draft_in(folder: str) -> Eagle3Draft:
    return load_draft(folder, target_in(target_folder()), context())


BAD_DRAFTS = {
    "missing": (lambda t: t.pop("midlayer.hidden_norm.weight"), r"tensor 'midlayer\.hidden_norm\.weight' is missing"),
    "absolute d2t": (lambda t: t.update({"d2t": t["d2t"] + torch.arange(40)}), r"d2t.*must hold\s+offsets"),
    "d2t beyond the vocabulary": (lambda t: t.update({"d2t": t["d2t"] + 30}), r"d2t"),
    "d2t against t2d": (lambda t: t.update({"t2d": torch.ones(64, dtype=torch.bool)}), r"agree with 't2d'"),
    "short d2t": (lambda t: t.update({"d2t": t["d2t"][:-1]}), r"d2t' in .* is \[39\]"),
    "no d2t": (lambda t: t.pop("d2t"), r"'d2t' is missing.*draft_vocab_size 40 needs it"),
    "half of fc_norm": (lambda t: t.update({"fc_norm.0.weight": torch.ones(32)}), r"fc_norm\.1\.weight' is missing"),
}


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_bad_draft_checkpoint_is_refused_with_the_tensor_name(name: str, tmp_path: Path) -> None:
    change, message = BAD_DRAFTS[name]
    with pytest.raises(ConfigError, match=message) as caught:
        draft_in(copy_of(draft_folder(target_folder(), draft_vocab=40), tmp_path / "bad", change))
    assert str(tmp_path / "bad") in str(caught.value)


def test_tied_target_may_contain_head_and_inverse_frequencies(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    target_in(copy_of(target_folder(tied=True), tmp_path / "target", add))


def copy_in_shards(folder: str, destination: Path, index: object | None = None) -> str:
    copy_of(folder, destination)
    split_checkpoint(destination, index)
    return str(destination)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"x": "../a.safetensors"}}, "outside the folder"),
        ({"weight_map": {"x": "c.safetensors"}}, "c.safetensors is missing"),
        ([], "not a weight index"),
        ({}, "not a weight index"),
    ],
)
def test_bad_weight_index_is_refused(index: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(copy_in_shards(target_folder(), tmp_path / "shards", index))


def copy_with_extra_tensors(folder: Path, extra: Tensors) -> str:
    """Write sharded weights to `folder`; one file also contains `extra` tensors that the index places elsewhere."""
    copy_in_shards(target_folder(), folder)
    save_file(load_file(folder / "model-2.safetensors") | extra, folder / "model-2.safetensors")
    return str(folder)


def test_weight_index_decides_which_copy_of_a_tensor_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain_folder = target_folder()
    first_shard = load_file(Path(copy_in_shards(plain_folder, tmp_path / "parts")) / "model-1.safetensors")
    extra = {name: torch.zeros_like(tensor) for name, tensor in first_shard.items()}
    extra["model.layers.9.mlp.up_proj.weight"] = torch.ones(3)
    folder = copy_with_extra_tensors(tmp_path / "overlay", extra)
    with caplog.at_level(logging.INFO, logger="cluster.models.checkpoint"):
        overlay_target, plain_target = target_in(folder), target_in(plain_folder)
    assert f"{len(extra)} tensors were not read, as the index of the weights names another file" in caplog.text
    for overlay_weight, plain_weight in zip(
        overlay_target.get_embed_and_head(), plain_target.get_embed_and_head(), strict=True
    ):
        dense_weights = [
            w if isinstance(w, torch.Tensor) else w.dense() for w in (overlay_weight.weight, plain_weight.weight)
        ]
        assert torch.equal(*dense_weights)
    assert stored_shapes(folder) == stored_shapes(plain_folder)
    assert Checkpoint(folder).shapes == Checkpoint(plain_folder).shapes


def test_weight_index_with_one_tensor_in_two_dialects_is_refused(tmp_path: Path) -> None:
    folder = Path(copy_with_extra_tensors(tmp_path / "shards", {"norm.weight": torch.ones(32)}))
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"norm.weight": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="appears twice"):
        Checkpoint(str(folder))


@pytest.mark.parametrize("listed", [True, False])
def test_tensor_omitted_or_misplaced_by_the_index_is_reported_missing(listed: bool, tmp_path: Path) -> None:
    """A file contains the tensor, but the index names another file for it, or does not list it."""
    name = "model.layers.0.mlp.up_proj.weight"
    folder = Path(copy_in_shards(target_folder(), tmp_path / "shards"))
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    own_file = weight_map.pop(name)
    other_file = next(file for file in weight_map.values() if file != own_file)
    index.write_text(json.dumps({"weight_map": weight_map | ({name: other_file} if listed else {})}))
    named_path, reason = (other_file, "names another file for it") if listed else ("shards", "leaves it out")
    with pytest.raises(
        ConfigError, match=rf"tensor '{name}' is missing in '.*{named_path}'; {own_file} holds it, but .* {reason}"
    ):
        target_in(str(folder))


NAMES = [
    ("model.", "lm_head.", "layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    ("model.", "lm_head.", "norm.weight", "model.norm.weight"),
    ("model.", "lm_head.", "lm_head.weight", "lm_head.weight"),
    ("", "lm_head.", "norm.weight", "norm.weight"),
    ("model.language_model.", "lm_head.", "embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    ("language_model.model.", "language_model.lm_head.", "lm_head.weight", "language_model.lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.", "norm.weight", "language_model.model.norm.weight"),
]


@pytest.mark.parametrize(("decoder", "head", "missing", "named"), NAMES)
def test_missing_tensor_is_named_with_the_prefix_of_the_checkpoint(
    decoder: str, head: str, missing: str, named: str, tmp_path: Path
) -> None:
    names = {f"{decoder}layers.{i}.mlp.up_proj.weight" for i in range(3)} | {f"{decoder}embed_tokens.weight"}
    names |= {f"{decoder}norm.weight", f"{head}weight"}
    save_file({name: torch.ones(2) for name in names - {named}}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^tensor '{re.escape(named)}' is missing in '.*model\.safetensors'$"):
        Checkpoint(str(tmp_path)).tensor(missing)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text"])
def test_missing_or_damaged_weight_file_is_named(damage: str, tmp_path: Path) -> None:
    folder = Path(copy_of(target_folder(), tmp_path / "target"))
    file = folder / "model.safetensors"
    content = {"missing": None, "empty": b"", "cut": file.read_bytes()[:5000], "text": b"not safetensors" * 20}[damage]
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        target_in(str(folder))
