"""FR-Spec's token map from a file: a draft scores only the map's ids, with rows of the target's head; speculation still
gives the tokens of plain decoding (law 1); errors name bad files.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.arch import read_draft, read_target
from cluster.cli import main
from cluster.config import ConfigError, EngineConfig
from cluster.distributed.mesh import Shard
from cluster.engine import build_engine
from cluster.models.checkpoint import Checkpoint
from cluster.models.draft import DraftModel
from cluster.request import LogitAdjustments
from tests.parity.harness import VOCAB, config_of, grid_requests, plain_run, run, tiny_pair
from tests.support.loading import context, load_draft, load_target
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models import draft_folders as write
from tests.unit.models.sharded import SummingExchange, run_on_shards

HOT_TOKENS = [3, 60, 7, 44, 12, 0, 63]
ROWS = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def write_json_map(folder: Path, ids: object = HOT_TOKENS) -> str:
    (folder / "hot.json").write_text(json.dumps(ids))
    return str(folder / "hot.json")


def write_tensor_map(folder: Path, **tensors: Tensor) -> str:
    save_file(tensors or {"ids": torch.tensor(HOT_TOKENS)}, folder / "hot.safetensors")
    return str(folder / "hot.safetensors")


def loaded_draft(folder: str, token_map: str | None) -> DraftModel:
    return load_draft(folder, load_target(target_folder(), context()), context(), token_map=token_map)


def nearly_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether logits are equal up to rounding. Matrix products of different widths may sum in another order."""
    return torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)


DRAFTS = {
    "eagle1": write.eagle1,
    "mistral": write.mistral,
    "mtp": lambda: write.mtp("mimo"),
    "eagle3": lambda: draft_folder(target_folder(), own_head=False),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_token_map_files_select_rows_of_the_target_head(kind: str, tmp_path: Path) -> None:
    folder = DRAFTS[kind]()
    all_logits = loaded_draft(folder, None).logits(ROWS).values
    for file in (
        write_json_map(tmp_path),
        write_tensor_map(tmp_path),
        write_tensor_map(tmp_path, ids=torch.tensor(HOT_TOKENS, dtype=torch.int32)),
    ):
        draft = loaded_draft(folder, file)
        assert draft.target_ids.tolist() == sorted(HOT_TOKENS)
        assert nearly_equal(draft.logits(ROWS).values, all_logits[:, sorted(HOT_TOKENS)])
        assert draft.spec.draft_vocab_size == len(HOT_TOKENS)


def test_token_map_file_equals_a_d2t_map_in_the_checkpoint(tmp_path: Path) -> None:
    """One draft has its map in the checkpoint, the other has the same map in a file."""
    draft_with_d2t = loaded_draft(write.eagle1(vocab=24), None)
    draft_with_file = loaded_draft(write.eagle1(), write_json_map(tmp_path, draft_with_d2t.target_ids.tolist()))
    assert torch.equal(draft_with_d2t.target_ids, draft_with_file.target_ids)
    assert torch.equal(draft_with_d2t.logits(ROWS).values, draft_with_file.logits(ROWS).values)


def test_token_map_rows_are_sharded_over_two_ranks(tmp_path: Path) -> None:
    folder, file = write.eagle1(), write_json_map(tmp_path)

    def rank(shard: Shard, exchange: SummingExchange) -> Tensor:
        load_context = context(exchange=exchange, shard=shard)
        draft = load_draft(folder, load_target(target_folder(), load_context), load_context, token_map=file)
        ids_per_rank = -(-len(HOT_TOKENS) // 2)
        local_ids = sorted(HOT_TOKENS)[shard.rank * ids_per_rank : (shard.rank + 1) * ids_per_rank]
        assert draft.shard_target_ids.tolist() == local_ids + [0] * (ids_per_rank - len(local_ids))
        return exchange.logits(draft.logits(ROWS))

    for logits in run_on_shards(2, rank):
        assert nearly_equal(logits, loaded_draft(folder, file).logits(ROWS).values)


def settings(folder: Path, topk: int, ids: list[int]) -> EngineConfig:
    draft, algorithm = write.mtp("mimo", vocab=VOCAB), {"speculative_algorithm": "NEXTN"}
    return config_of(tiny_pair()[0], draft, topk, 3, **algorithm, speculative_token_map=write_json_map(folder, ids))


@pytest.mark.parametrize(("sampling", "topk"), [("greedy", 1), ("greedy", 3), ("0.8", 2)])
def test_speculation_with_a_token_map_equals_plain_decoding(sampling: str, topk: int, tmp_path: Path) -> None:
    """The draft proposes only ids of the map; the outputs are those of plain decoding."""
    ids = list(range(1, VOCAB, 2))
    engine = build_engine(settings(tmp_path, topk, ids))
    draft, trees = engine._parts.lockstep.step._draft, []
    original_draft = draft.draft
    draft.draft = lambda *arguments: trees.append(original_draft(*arguments)) or trees[-1]  # type: ignore[method-assign,func-returns-value]
    result = run(engine, grid_requests(sampling, 8))
    assert result.completions == plain_run(sampling).completions
    proposed = {int(token) for tree in trees for token in tree.tokens[:, 1:].flatten()}
    assert proposed <= set(ids)
    assert len(proposed) > 4
    assert max(result.accept_lens) > 1


@pytest.mark.parametrize("ids", [list(range(VOCAB // 2)), list(range(1, VOCAB, 2))], ids=["first half", "every other"])
def test_requests_with_penalties_speculate_with_a_token_map(ids: list[int], tmp_path: Path) -> None:
    """The map has the first half of the target's ids, or every other id. Penalties, biases and bad words apply."""
    adjustments = LogitAdjustments(
        0.4, 0.3, 1.2, ((3, 1.0), (20, 2.0)), bad_words_token_ids=((5,), (7, 3)), min_tokens=6
    )
    requests = [
        replace(request, params=replace(request.params, adjustments=adjustments)) for request in grid_requests("0.8", 4)
    ]
    plain_outputs: dict[str, object] = {}
    for request in requests:
        plain_outputs |= run(build_engine(config_of(tiny_pair()[0], disable_radix_cache=True)), [request]).completions
    result = run(build_engine(settings(tmp_path, 2, ids)), requests)
    assert result.completions == plain_outputs and max(result.accept_lens) > 1


BAD_FILES = {
    "is not a file": lambda folder: str(folder / "nowhere.json"),
    "not valid JSON": lambda folder: write_broken_file(folder / "hot.json", b"[1, 2"),
    "not valid JSON:": lambda folder: write_broken_file(folder / "hot.json", b"[" * 100_000),
    "must hold a list of token ids": lambda folder: write_json_map(folder, {"ids": [1]}),
    "a list of token ids, ": lambda folder: write_json_map(folder, [1, True]),
    "holds 64, which is not an id of the target's 64": lambda folder: write_json_map(folder, [1, 64]),
    "holds -1,": lambda folder: write_json_map(folder, [-1, 1]),
    "each id once": lambda folder: write_json_map(folder, [1, 2, 1]),
    "at least one; it holds 0": lambda folder: write_json_map(folder, []),
    "one tensor": lambda folder: write_tensor_map(folder, a=torch.tensor([1]), b=torch.tensor([2])),
    "of I64 or I32": lambda folder: write_tensor_map(folder, a=torch.tensor([1.0])),
    "tensor [ids]": lambda folder: write_tensor_map(folder, a=torch.tensor([[1]])),
    "hot.safetensors": lambda folder: write_broken_file(folder / "hot.safetensors", b"\x80\x04pickle"),
}


def write_broken_file(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return str(file)


@pytest.mark.parametrize("message", BAD_FILES)
def test_bad_token_map_file_is_refused_by_name(message: str, tmp_path: Path) -> None:
    file, draft = BAD_FILES[message](tmp_path), write.eagle1()
    with pytest.raises(ConfigError) as caught:
        read_draft(draft, Checkpoint(draft).shapes, read_target(target_folder()), token_map=file)
    assert message in str(caught.value)
    assert Path(file).name in str(caught.value)


@pytest.mark.parametrize(
    ("write_draft", "conflict"),
    [
        (lambda: write.eagle1(vocab=24), "a vocabulary map, d2t, of its own"),
        (lambda: draft_folder(target_folder()), "a head of its own"),
    ],
)
def test_draft_with_its_own_head_or_map_refuses_a_token_map(write_draft: object, conflict: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"speculative_token_map .* {conflict}"):
        loaded_draft(write_draft(), write_json_map(tmp_path))  # type: ignore[operator]


def test_token_map_setting_is_validated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pickle \(.pt\) is not read"):
        config_of(tiny_pair()[0], tiny_pair()[1], speculative_token_map="hot.pt")
    with pytest.raises(ConfigError, match="speculative_token_map needs speculative_draft_model_path"):
        config_of(tiny_pair()[0], speculative_token_map="hot.json")
    with pytest.raises(ConfigError, match="topk 3 is more than the draft's vocabulary of 2"):
        build_engine(settings(tmp_path, 3, [1, 2]))


def test_inspect_reports_the_token_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", target_folder(), "--draft", write.eagle1(), "--token-map"]
    assert main([*arguments, write_json_map(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft"]["draft_vocab_size"] == len(HOT_TOKENS)
    assert "token_map" not in report["draft"]["spec"], "a report must not list a map's ids, which can be 32,000"
    assert main([*arguments, write_json_map(tmp_path, [99])]) == 1
    assert "99, which is not an id" in capsys.readouterr().out
