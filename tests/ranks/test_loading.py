"""A rank reads its own shard of each tensor, no more: over all ranks every sharded tensor is read once."""

from collections import Counter
from math import prod

import pytest
import torch

from cluster.arch.resolve import resolve_models
from cluster.config import EngineConfig
from cluster.engine.build import prepare
from cluster.mesh import Axis, Mesh
from cluster.models.checkpoint import Checkpoint, Matrix
from cluster.models.formats import Span
from tests.ranks.test_parity import config
from tests.tiny import draft_folder, target_folder

ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
VOCAB = ("embed_tokens.weight", "lm_head.weight")


def read_by(rank: int, tp: int, dp: int, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Counter[str]:
    """Elements of every tensor that a rank took from the checkpoints."""
    taken: Counter[str] = Counter()
    true = Checkpoint.matrix

    def matrix(
        self: Checkpoint,
        name: str,
        shape: tuple[int, ...] | None = None,
        rows: Span | None = None,
        columns: Span | None = None,
        expert: int | None = None,
    ) -> Matrix:
        got = true(self, name, shape, rows, columns, expert)
        if (
            not isinstance(got, torch.Tensor) or got.is_meta
        ):  # names and shapes are checked before the first tensor is read
            return got
        taken[f"{self.folder.rsplit('/')[-1].split('-')[0]} {name}"] += got.numel()
        return got

    monkeypatch.setattr(Checkpoint, "matrix", matrix)
    target = target_folder(vocab_size=24)
    given = config(target, draft_folder(target), tp_size=tp, attn_dp_size=dp, **settings)
    attn = tp // dp
    mesh = Mesh(rank, Axis(rank, tp), Axis(rank % attn, attn) if attn > 1 else Axis())
    prepare(resolve_models(EngineConfig.from_kwargs(given)), mesh, torch.device("cpu"))
    monkeypatch.setattr(Checkpoint, "matrix", true)
    return taken


def sizes() -> dict[str, int]:
    target = target_folder(vocab_size=24)
    folders = {"target": target, "draft": draft_folder(target)}
    shapes = {kind: Checkpoint(folder).shapes for kind, folder in folders.items()}
    return {f"{kind} {name}": prod(shape) for kind, each in shapes.items() for name, shape in each.items()}


@pytest.mark.parametrize(
    ("dp", "vocab_parallel", "whole"),
    [(1, "attention", ()), (2, "attention", ATTENTION + VOCAB), (2, "world", ATTENTION)],
)
def test_two_ranks_read_every_sharded_tensor_once(
    monkeypatch: pytest.MonkeyPatch, dp: int, vocab_parallel: str, whole: tuple[str, ...]
) -> None:
    """With a group per rank, attention (and the vocabulary, unless it is spread over the world) is not sharded."""
    reads = [read_by(rank, 2, dp, monkeypatch, vocab_parallel=vocab_parallel) for rank in range(2)]
    for name, size in sizes().items():
        sharded = name.endswith(ATTENTION + MLP + VOCAB) and not name.endswith(whole or ("nothing",))
        each = [read[name] for read in reads]
        assert each == ([size // 2] * 2 if sharded else [size] * 2), f"{name} of {size}: {each}"


def test_a_replicated_draft_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_by(1, 2, 1, monkeypatch, speculative_draft_parallel="replicated")
    for name, size in sizes().items():
        if name.startswith("draft"):
            assert read[name] == size, name
