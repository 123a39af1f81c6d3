"""FR-Spec's token map from a file: a draft ranks those ids with the target's rows, law 1 stays, bad files are named."""

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
from tests.loading import context, load_draft, load_target
from tests.parity.harness import VOCAB, config_of, grid_requests, plain_run, run, tiny_pair
from tests.tiny import draft_folder, target_folder
from tests.unit.models import draft_folders as write
from tests.unit.models.sharded import Summed, on_shards

HOT = [3, 60, 7, 44, 12, 0, 63]
ROWS = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def as_json(folder: Path, ids: object = HOT) -> str:
    (folder / "hot.json").write_text(json.dumps(ids))
    return str(folder / "hot.json")


def as_tensor(folder: Path, **tensors: Tensor) -> str:
    save_file(tensors or {"ids": torch.tensor(HOT)}, folder / "hot.safetensors")
    return str(folder / "hot.safetensors")


def loaded(folder: str, token_map: str | None) -> DraftModel:
    return load_draft(folder, load_target(target_folder(), context()), context(), token_map=token_map)


def near(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to the order in which a matrix product of another width adds up."""
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
    everything = loaded(folder, None).logits(ROWS).values
    for file in (as_json(tmp_path), as_tensor(tmp_path), as_tensor(tmp_path, ids=torch.tensor(HOT, dtype=torch.int32))):
        draft = loaded(folder, file)
        assert draft.target_ids.tolist() == sorted(HOT)
        assert near(draft.logits(ROWS).values, everything[:, sorted(HOT)])
        assert draft.spec.draft_vocab_size == len(HOT)


def test_token_map_file_equals_a_d2t_map_in_the_checkpoint(tmp_path: Path) -> None:
    """The same draft with its map inside the checkpoint, and beside it."""
    inside = loaded(write.eagle1(vocab=24), None)
    beside = loaded(write.eagle1(), as_json(tmp_path, inside.target_ids.tolist()))
    assert torch.equal(inside.target_ids, beside.target_ids)
    assert torch.equal(inside.logits(ROWS).values, beside.logits(ROWS).values)


def test_token_map_rows_are_sharded_over_two_ranks(tmp_path: Path) -> None:
    folder, file = write.eagle1(), as_json(tmp_path)

    def rank(part: Shard, exchange: Summed) -> Tensor:
        given = context(exchange=exchange, part=part)
        draft = load_draft(folder, load_target(target_folder(), given), given, token_map=file)
        each = -(-len(HOT) // 2)
        own = sorted(HOT)[part.rank * each : (part.rank + 1) * each]
        assert draft.shard_target_ids.tolist() == own + [0] * (each - len(own))
        return exchange.logits(draft.logits(ROWS))

    for logits in on_shards(2, rank):
        assert near(logits, loaded(folder, file).logits(ROWS).values)


def settings(folder: Path, topk: int, ids: list[int]) -> EngineConfig:
    draft, more = write.mtp("mimo", vocab=VOCAB), {"speculative_algorithm": "NEXTN"}
    return config_of(tiny_pair()[0], draft, topk, 3, **more, speculative_token_map=as_json(folder, ids))


@pytest.mark.parametrize(("sampling", "topk"), [("greedy", 1), ("greedy", 3), ("0.8", 2)])
def test_speculation_with_a_token_map_equals_plain_decoding(sampling: str, topk: int, tmp_path: Path) -> None:
    """The draft proposes nothing but the ids of the map; the target says what it would have said."""
    ids = list(range(1, VOCAB, 2))
    engine = build_engine(settings(tmp_path, topk, ids))
    draft, seen = engine._parts.lockstep.step._draft, []
    true = draft.draft
    draft.draft = lambda *given: seen.append(true(*given)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    result = run(engine, grid_requests(sampling, 8))
    assert result.ended == plain_run(sampling).ended
    proposed = {int(token) for tree in seen for token in tree.tokens[:, 1:].flatten()}
    assert proposed <= set(ids)
    assert len(proposed) > 4
    assert max(result.accept_lens) > 1


@pytest.mark.parametrize("ids", [list(range(VOCAB // 2)), list(range(1, VOCAB, 2))], ids=["the first", "every other"])
def test_requests_with_penalties_speculate_with_a_token_map(ids: list[int], tmp_path: Path) -> None:
    """Penalties, biases and bad words of those ids, be they the first of the target's or others."""
    given = LogitAdjustments(0.4, 0.3, 1.2, ((3, 1.0), (20, 2.0)), bad_words_token_ids=((5,), (7, 3)), min_tokens=6)
    asked = [replace(one, params=replace(one.params, adjustments=given)) for one in grid_requests("0.8", 4)]
    plain: dict[str, object] = {}
    for one in asked:
        plain |= run(build_engine(config_of(tiny_pair()[0], disable_radix_cache=True)), [one]).ended
    result = run(build_engine(settings(tmp_path, 2, ids)), asked)
    assert result.ended == plain and max(result.accept_lens) > 1


BAD = {
    "is not a file": lambda folder: str(folder / "nowhere.json"),
    "not valid JSON": lambda folder: broken(folder / "hot.json", b"[1, 2"),
    "not valid JSON:": lambda folder: broken(folder / "hot.json", b"[" * 100_000),
    "must hold a list of token ids": lambda folder: as_json(folder, {"ids": [1]}),
    "a list of token ids, ": lambda folder: as_json(folder, [1, True]),
    "holds 64, which is not an id of the target's 64": lambda folder: as_json(folder, [1, 64]),
    "holds -1,": lambda folder: as_json(folder, [-1, 1]),
    "each id once": lambda folder: as_json(folder, [1, 2, 1]),
    "at least one; it holds 0": lambda folder: as_json(folder, []),
    "one tensor": lambda folder: as_tensor(folder, a=torch.tensor([1]), b=torch.tensor([2])),
    "of I64 or I32": lambda folder: as_tensor(folder, a=torch.tensor([1.0])),
    "tensor [ids]": lambda folder: as_tensor(folder, a=torch.tensor([[1]])),
    "hot.safetensors": lambda folder: broken(folder / "hot.safetensors", b"\x80\x04pickle"),
}


def broken(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return str(file)


@pytest.mark.parametrize("says", BAD)
def test_bad_token_map_file_is_refused_by_name(says: str, tmp_path: Path) -> None:
    file, draft = BAD[says](tmp_path), write.eagle1()
    with pytest.raises(ConfigError) as caught:
        read_draft(draft, Checkpoint(draft).shapes, read_target(target_folder()), token_map=file)
    assert says in str(caught.value)
    assert Path(file).name in str(caught.value)


@pytest.mark.parametrize(
    ("draft", "has"),
    [
        (lambda: write.eagle1(vocab=24), "a vocabulary map, d2t, of its own"),
        (lambda: draft_folder(target_folder()), "a head of its own"),
    ],
)
def test_draft_with_its_own_head_or_map_refuses_a_token_map(draft: object, has: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"speculative_token_map .* {has}"):
        loaded(draft(), as_json(tmp_path))  # type: ignore[operator]


def test_token_map_setting_is_validated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pickle \(.pt\) is not read"):
        config_of(tiny_pair()[0], tiny_pair()[1], speculative_token_map="hot.pt")
    with pytest.raises(ConfigError, match="speculative_token_map needs speculative_draft_model_path"):
        config_of(tiny_pair()[0], speculative_token_map="hot.json")
    with pytest.raises(ConfigError, match="topk 3 is more than the draft's vocabulary of 2"):
        build_engine(settings(tmp_path, 3, [1, 2]))


def test_inspect_reports_the_token_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", target_folder(), "--draft", write.eagle1(), "--token-map"]
    assert main([*words, as_json(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft"]["draft_vocab_size"] == len(HOT)
    assert "token_map" not in report["draft"]["spec"], "32,000 numbers help nobody"
    assert main([*words, as_json(tmp_path, [99])]) == 1
    assert "99, which is not an id" in capsys.readouterr().out
