"""A rank reads its own shard of each tensor, no more: over all ranks every sharded tensor is read once."""

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch

from cluster.arch.resolve import resolve_models
from cluster.config import EngineConfig
from cluster.distributed.mesh import Axis, Mesh
from cluster.engine.build import prepare
from cluster.models.checkpoint import Checkpoint, CheckpointMatrix
from cluster.models.formats import Span
from tests.families import made
from tests.ranks.test_experts import UNEVEN
from tests.ranks.test_parity import config
from tests.tiny import draft_folder, target_folder
from tests.unit.models.quantised_folders import quantised
from tests.unit.models.test_quantised import packed_experts

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
        device: torch.device | None = None,
    ) -> CheckpointMatrix:
        got = true(self, name, shape, rows, columns, expert, device)
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
def test_two_ranks_together_read_every_sharded_tensor_once(
    monkeypatch: pytest.MonkeyPatch, dp: int, vocab_parallel: str, whole: tuple[str, ...]
) -> None:
    """With a group per rank, attention (and the vocabulary, unless it is spread over the world) is not sharded."""
    reads = [read_by(rank, 2, dp, monkeypatch, vocab_parallel=vocab_parallel) for rank in range(2)]
    for name, size in sizes().items():
        sharded = name.endswith(ATTENTION + MLP + VOCAB) and not name.endswith(whole or ("nothing",))
        each = [read[name] for read in reads]
        assert each == ([size // 2] * 2 if sharded else [size] * 2), f"{name} of {size}: {each}"


def test_replicated_draft_is_read_completely_by_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_by(1, 2, 1, monkeypatch, speculative_draft_parallel="replicated")
    for name, size in sizes().items():
        if name.startswith("draft"):
            assert read[name] == size, name


@pytest.mark.parametrize("kind", ["int4", "fp8 block", "awq", "dense", "mxfp4"])
@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
def test_rank_reads_only_its_own_experts(kind: str, attention_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that belongs to an expert, codes and scales, on one rank and no other; of a stack of experts its own part."""
    folder = packed_experts()[0] if kind == "mxfp4" else made(*UNEVEN).folder
    folder = quantised(kind, experts=True)[0] if kind not in ("mxfp4", "dense") else folder
    given = {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "attention_backend": attention_backend}
    reads = [experts_read_by(rank, folder, given, monkeypatch) for rank in range(2)]
    whole = {name for name in Checkpoint(folder)._files if ".experts." in name}
    assert reads[0].keys() | reads[1].keys() >= {name for name in whole if "input_scale" not in name}
    if kind == "mxfp4":
        assert {frozenset(read.values()) for read in reads} == {frozenset({(0, 1)}), frozenset({(1, 3)})}
    else:
        held = [{int(name.split(".experts.")[1].split(".")[0]) for name in read} for read in reads]
        assert held == ([{0, 1}, {2, 3, 4}] if kind == "dense" else [{0}, {1, 2}])


@pytest.mark.parametrize(
    ("ep", "said"),
    [
        (1, "target: 5 experts, each by columns over 4 ranks"),
        (2, "target: 5 experts, 0 to 1 on ranks 0 to 1 by columns, 2 to 4 on ranks 2 to 3 by columns"),
        (4, "target: 5 experts, 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 to 4 on rank 3"),
    ],
)
def test_rank_reports_the_placement_of_all_experts(ep: int, said: str) -> None:
    given = config(made(*UNEVEN).folder, None, tp_size=4, attn_dp_size=4, ep_size=ep)
    for rank in (0, 3):
        mesh = Mesh(rank, Axis(rank, 4), Axis())
        made_of = prepare(resolve_models(EngineConfig.from_kwargs(given)), mesh, torch.device("cpu"))
        assert made_of.models.experts == (said,)


def experts_read_by(
    rank: int, folder: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[int, int]]:
    """The stored tensors of experts that a rank reads, and which experts of a stack."""
    taken: dict[str, tuple[int, int]] = {}
    true = Checkpoint.read

    def read(self: Checkpoint, stored: str, index: Any = (), device: torch.device | None = None) -> torch.Tensor:
        got = true(self, stored, index, device)
        if ".experts." in stored and not got.is_meta:
            at = index[0] if index else slice(0, 0)
            first, stop = (at, at + 1) if isinstance(at, int) else (at.start or 0, at.stop or 0)
            before = taken.get(stored, (first, stop))
            taken[stored] = min(before[0], first), max(before[1], stop)
        return got

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read", read)
        mesh = Mesh(rank, Axis(rank, 2), Axis())
        prepare(resolve_models(EngineConfig.from_kwargs(config(folder, None, **given))), mesh, torch.device("cpu"))
    return taken
