"""A rank reads only its own shard of each tensor: all ranks together read every sharded tensor once."""

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
from tests.distributed.test_experts import FIVE_EXPERT_TARGET
from tests.distributed.test_parity import config
from tests.support.families import family_checkpoint
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models.quantised_folders import quantised
from tests.unit.models.test_quantised import packed_experts

ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
VOCAB = ("embed_tokens.weight", "lm_head.weight")


def elements_read_by_rank(
    rank: int, tp: int, dp: int, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> Counter[str]:
    """Load the models of one rank; return how many elements of each tensor the rank read from the checkpoints."""
    elements_by_tensor: Counter[str] = Counter()
    original = Checkpoint.matrix

    def matrix(
        self: Checkpoint,
        name: str,
        shape: tuple[int, ...] | None = None,
        rows: Span | None = None,
        columns: Span | None = None,
        expert: int | None = None,
        device: torch.device | None = None,
    ) -> CheckpointMatrix:
        matrix_read = original(self, name, shape, rows, columns, expert, device)
        if (
            not isinstance(matrix_read, torch.Tensor) or matrix_read.is_meta
        ):  # the check of names and shapes, before any tensor is read
            return matrix_read
        elements_by_tensor[f"{self.folder.rsplit('/')[-1].split('-')[0]} {name}"] += matrix_read.numel()
        return matrix_read

    monkeypatch.setattr(Checkpoint, "matrix", matrix)
    target = target_folder(vocab_size=24)
    config_dict = config(target, draft_folder(target), tp_size=tp, attn_dp_size=dp, **settings)
    attn = tp // dp
    mesh = Mesh(rank, Axis(rank, tp), Axis(rank % attn, attn) if attn > 1 else Axis())
    prepare(resolve_models(EngineConfig.from_kwargs(config_dict)), mesh, torch.device("cpu"))
    monkeypatch.setattr(Checkpoint, "matrix", original)
    return elements_by_tensor


def tensor_sizes() -> dict[str, int]:
    """The number of elements of each tensor in the checkpoints of target and draft."""
    target = target_folder(vocab_size=24)
    folders = {"target": target, "draft": draft_folder(target)}
    shapes = {kind: Checkpoint(folder).shapes for kind, folder in folders.items()}
    return {
        f"{kind} {name}": prod(shape)
        for kind, shapes_by_name in shapes.items()
        for name, shape in shapes_by_name.items()
    }


@pytest.mark.parametrize(
    ("dp", "vocab_parallel", "unsharded"),
    [(1, "attention", ()), (2, "attention", ATTENTION + VOCAB), (2, "world", ATTENTION)],
)
def test_two_ranks_together_read_every_sharded_tensor_once(
    monkeypatch: pytest.MonkeyPatch, dp: int, vocab_parallel: str, unsharded: tuple[str, ...]
) -> None:
    """With one attention group for each rank, attention is not sharded, and the vocabulary is sharded only if it is
    spread over the world. `unsharded` are the tensors that each rank reads completely.
    """
    reads = [elements_read_by_rank(rank, 2, dp, monkeypatch, vocab_parallel=vocab_parallel) for rank in range(2)]
    for name, size in tensor_sizes().items():
        sharded = name.endswith(ATTENTION + MLP + VOCAB) and not name.endswith(unsharded or ("nothing",))
        elements_by_rank = [read[name] for read in reads]
        assert elements_by_rank == ([size // 2] * 2 if sharded else [size] * 2), f"{name} of {size}: {elements_by_rank}"


def test_replicated_draft_is_read_completely_by_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    read = elements_read_by_rank(1, 2, 1, monkeypatch, speculative_draft_parallel="replicated")
    for name, size in tensor_sizes().items():
        if name.startswith("draft"):
            assert read[name] == size, name


@pytest.mark.parametrize("kind", ["int4", "fp8 block", "awq", "dense", "mxfp4"])
@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
def test_rank_reads_only_its_own_experts(kind: str, attention_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, and no other, reads everything that belongs to an expert: codes and scales. From a tensor that stacks
    all experts a rank reads only its own experts.
    """
    folder = packed_experts()[0] if kind == "mxfp4" else family_checkpoint(*FIVE_EXPERT_TARGET).folder
    folder = quantised(kind, experts=True)[0] if kind not in ("mxfp4", "dense") else folder
    mesh_settings = {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "attention_backend": attention_backend}
    reads = [experts_read_by_rank(rank, folder, mesh_settings, monkeypatch) for rank in range(2)]
    expert_tensors = {name for name in Checkpoint(folder)._files if ".experts." in name}
    assert reads[0].keys() | reads[1].keys() >= {name for name in expert_tensors if "input_scale" not in name}
    if kind == "mxfp4":
        assert {frozenset(read.values()) for read in reads} == {frozenset({(0, 1)}), frozenset({(1, 3)})}
    else:
        experts_by_rank = [{int(name.split(".experts.")[1].split(".")[0]) for name in read} for read in reads]
        assert experts_by_rank == ([{0, 1}, {2, 3, 4}] if kind == "dense" else [{0}, {1, 2}])


@pytest.mark.parametrize(
    ("ep", "expected_text"),
    [
        (1, "target: 5 experts, each by columns over 4 ranks"),
        (2, "target: 5 experts, 0 to 1 on ranks 0 to 1 by columns, 2 to 4 on ranks 2 to 3 by columns"),
        (4, "target: 5 experts, 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 to 4 on rank 3"),
    ],
)
def test_rank_reports_the_placement_of_all_experts(ep: int, expected_text: str) -> None:
    config_dict = config(family_checkpoint(*FIVE_EXPERT_TARGET).folder, None, tp_size=4, attn_dp_size=4, ep_size=ep)
    for rank in (0, 3):
        mesh = Mesh(rank, Axis(rank, 4), Axis())
        prepared = prepare(resolve_models(EngineConfig.from_kwargs(config_dict)), mesh, torch.device("cpu"))
        assert prepared.models.experts == (expected_text,)


def experts_read_by_rank(
    rank: int, folder: str, mesh_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[int, int]]:
    """The stored tensors of experts that a rank reads, each with the range of experts [first, stop) that the rank reads
    from a stack; (0, 0) if the tensor is no stack.
    """
    experts_by_tensor: dict[str, tuple[int, int]] = {}
    original = Checkpoint.read

    def read(self: Checkpoint, tensor_name: str, index: Any = (), device: torch.device | None = None) -> torch.Tensor:
        tensor = original(self, tensor_name, index, device)
        if ".experts." in tensor_name and not tensor.is_meta:
            expert_index = index[0] if index else slice(0, 0)
            first, stop = (
                (expert_index, expert_index + 1)
                if isinstance(expert_index, int)
                else (expert_index.start or 0, expert_index.stop or 0)
            )
            known_range = experts_by_tensor.get(tensor_name, (first, stop))
            experts_by_tensor[tensor_name] = min(known_range[0], first), max(known_range[1], stop)
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read", read)
        mesh = Mesh(rank, Axis(rank, 2), Axis())
        prepare(
            resolve_models(EngineConfig.from_kwargs(config(folder, None, **mesh_settings))), mesh, torch.device("cpu")
        )
    return experts_by_tensor
