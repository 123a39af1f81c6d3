"""What a rank reads of a checkpoint: its shard, each number once, in little more memory than the shard takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.arch.safetensors.header import read_header
from cluster.distributed.mesh import Shard
from cluster.models.slices import SliceReader
from tests.families import FAMILIES, made
from tests.loading import context, load_target

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def painted(folder: str, part: Shard, patch: pytest.MonkeyPatch) -> dict[tuple[Path, int], Tensor]:
    """How often each number of each tensor (by file and first byte) was read for one rank."""
    seen: dict[tuple[Path, int], Tensor] = {}
    read = SliceReader.read

    def note(self: SliceReader, path: Path, start: int, shape: tuple[int, ...], *rest: Any) -> Tensor:
        counts = seen.setdefault((path, start), torch.zeros(shape, dtype=torch.int32))
        counts[rest[1]] += 1
        return read(self, path, start, shape, *rest)

    patch.setattr(SliceReader, "read", note)
    load_target(folder, context(part=part, max_position=8))
    patch.undo()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_each_number_at_most_once_and_all_ranks_read_all(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(family, next(iter(FAMILIES[family].cases))).folder
    whole = painted(folder, Shard(), monkeypatch)
    assert all(bool((counts == 1).all()) for counts in whole.values())
    ranks = [painted(folder, Shard(rank, 2), monkeypatch) for rank in range(2)]
    assert ranks[0].keys() == ranks[1].keys() == whole.keys()
    halves = 0
    for key in whole:
        first, second = ranks[0][key], ranks[1][key]
        assert int(first.max()) == int(second.max()) == 1
        assert bool((first + second).bool().all()), "together the ranks read everything"
        halves += int((first + second).max()) == 1
    assert halves >= 8, "what can be sharded is read by one rank alone"
    named = {(path, s.start) for path in Path(folder).glob("*.safetensors") for s in read_header(path).values()}
    assert whole.keys() <= named


LOADING = """
import json, resource, sys, torch
from cluster.distributed.mesh import Shard
from tests.loading import context, load_target
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
part = Shard(1, 2)
target = load_target(sys.argv[1], context(torch.float32, part=part))
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))
"""


@pytest.mark.slow
def test_loading_takes_little_more_than_the_shard(tmp_path: Path) -> None:
    """A checkpoint of 1.3 GB at tp 2: the peak stays below 1.15 times the shard plus 200 MB."""
    config = json.loads((Path(made("llama", "dynamic rope").folder) / "config.json").read_text())
    h, i, v, layers = 1024, 4096, 16384, 18
    config |= {"hidden_size": h, "intermediate_size": i, "vocab_size": v, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(v, h), "lm_head.weight": torch.zeros(v, h)}
    tensors["model.norm.weight"] = torch.ones(h)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.self_attn.{p}_proj.weight": torch.zeros(h, h) for p in "qkvo"}
        tensors |= {f"{at}.mlp.{p}_proj.weight": torch.zeros(i, h) for p in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = torch.zeros(h, i)
        tensors |= {f"{at}.{p}_layernorm.weight": torch.ones(h) for p in ("input", "post_attention")}
    size = sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert size > 1.2e9
    assert int(done.stdout) < 1.15 * size / 2 + 200e6
