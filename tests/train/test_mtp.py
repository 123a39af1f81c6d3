"""Training of MTP layers: they match the format's reference, the loss falls, and the engine serves the saved layers."""

from pathlib import Path

import pytest
import torch

from cluster.bench.pair import PLAIN, ModelPair, TreeChoice
from cluster.bench.runs import fixed_length_params, run_batch
from cluster.engine import build_engine
from cluster.train.draft import DraftRecipe
from cluster.train.eagle3 import DraftShape
from cluster.train.mtp import MtpDraft, MtpShape, save_mtp
from cluster.train.optimizer import Optimizers
from cluster.train.runners import MtpRecipe, MtpText, mtp_loss
from cluster.train.samples import continue_rows
from cluster.train.target import load_target, split_parameters
from tests.parity.reference import target_reference
from tests.support.tiny_checkpoints import target_folder
from tests.unit.models.draft_reference import Mtp

SHAPE = DraftShape(vocab_size=64, hidden_size=32, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
TEXT = [5, 40, 12, 33, 7, 7, 61, 20, 2, 18, 50, 9, 31]
PART_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
LEVELS = 3


def with_storable_weights(draft: MtpDraft) -> MtpDraft:
    """Convert the draft to float64, with random weights that bf16 holds exactly in the form that the format stores.

    The format stores a one-dimensional weight (of a norm) minus one.
    """
    draft.double()
    with torch.no_grad():
        draft.head.copy_(draft.head.bfloat16())
        for parameter in draft.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
            stored_offset = float(parameter.ndim == 1)
            parameter.copy_((parameter - stored_offset).bfloat16().double() + stored_offset)
    return draft


@pytest.mark.parametrize("count", [1, 3])
def test_unrolled_mtp_levels_match_the_format_reference(count: int, tmp_path: Path) -> None:
    """A single layer reads its own output at the next level; with three layers, each reads the layer before it.

    At every level, the cells before the last one come from the same text.
    """
    folder = target_folder()
    torch.manual_seed(4)
    draft = with_storable_weights(MtpDraft(MtpShape(SHAPE, count, 4), load_target(Path(folder))))
    save_mtp(draft, tmp_path)
    target = target_reference(folder)
    layers = [
        Mtp(
            str(tmp_path),
            target,
            at=f"layers.{4 + i}.",
            inner=f"layers.{4 + i}.transformer.",
            parts=PART_NAMES,
            gemma=True,
            pre=True,
            head=f"layers.{4 + i}.shared_head.output.weight",
        )
        for i in range(count)
    ]
    target_run = target.run(TEXT)
    embeddings = target.w["embed_tokens.weight"][torch.tensor(TEXT[1:])][None]
    for last in range(1, len(TEXT) - LEVELS):
        unrolled = draft.unroll(target_run.hidden[None, : last + 1], embeddings[:, : last + LEVELS], LEVELS)
        hidden_source = target_run.hidden[: last + 1]
        for level in range(LEVELS):
            if count == 1:
                logits, level_output = layers[0].run(TEXT[1 : len(hidden_source) + 1], hidden_source)
                hidden_source = torch.cat([hidden_source, level_output[-1:]])
            else:
                logits, hidden_source = layers[level].run(TEXT[1 + level : last + 2 + level], hidden_source)
            torch.testing.assert_close(unrolled[level][0, last], logits[-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("count", [1, 3])
def test_mtp_training_lowers_the_loss_and_the_engine_serves_the_result(count: int, tmp_path: Path) -> None:
    folder = target_folder(spread=0.3)
    target = load_target(Path(folder))
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, 64, (8, 6), generator=generator)
    ids = continue_rows(target, prompts, 42, torch.tensor([0.0, 0.8] * 4), seed=3)
    with torch.no_grad():
        text = MtpText(ids, target.model(input_ids=ids, use_cache=False).last_hidden_state)
    recipe = MtpRecipe(layers=count, levels=LEVELS, draft=DraftRecipe(shape=SHAPE))
    torch.manual_seed(1)
    draft = MtpDraft(MtpShape(SHAPE, count, 4), target)
    optimizers = Optimizers(*split_parameters(draft), matrix_lr=0.02, other_lr=0.004)
    losses = []
    for _ in range(80):
        loss = mtp_loss(draft, target, text, recipe)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    save_mtp(draft, tmp_path)
    pair = ModelPair(folder, str(tmp_path), "float64", 1)
    engines = [build_engine(pair.config(shape, 4)) for shape in (PLAIN, TreeChoice(LEVELS))]
    for temperature in (0.0, 0.8):
        params = [fixed_length_params(24, temperature, seed) for seed in range(4)]
        plain, drafted = (run_batch(engine, prompts[:4].tolist(), params) for engine in engines)
        assert drafted.tokens == plain.tokens
        assert drafted.accept_length > 1.2, "the trained draft predicts too few tokens"
