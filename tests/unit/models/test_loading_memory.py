"""A rank that loads a checkpoint needs little more memory than its shard."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.families import family_checkpoint

ROOT = Path(__file__).resolve().parents[3]


LOADING = """
import json, resource, sys, torch
from cluster.distributed.mesh import Shard
from tests.support.loading import context, load_target
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shard = Shard(1, 2)
target = load_target(sys.argv[1], context(torch.float32, shard=shard))
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))
"""


@pytest.mark.slow
def test_loading_peak_memory_is_close_to_the_shard_size(tmp_path: Path) -> None:
    """A checkpoint of 1.3 GB at tp 2: the peak stays below 1.15 times the shard plus 200 MB."""
    config = json.loads((Path(family_checkpoint("llama", "dynamic rope").folder) / "config.json").read_text())
    h, i, v, layers = 1024, 4096, 16384, 18
    config |= {"hidden_size": h, "intermediate_size": i, "vocab_size": v, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(v, h), "lm_head.weight": torch.zeros(v, h)}
    tensors["model.norm.weight"] = torch.ones(h)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.self_attn.{p}_proj.weight": torch.zeros(h, h) for p in "qkvo"}
        tensors |= {f"{prefix}.mlp.{p}_proj.weight": torch.zeros(i, h) for p in ("gate", "up")}
        tensors[f"{prefix}.mlp.down_proj.weight"] = torch.zeros(h, i)
        tensors |= {f"{prefix}.{p}_layernorm.weight": torch.ones(h) for p in ("input", "post_attention")}
    size = sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    process = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert process.returncode == 0, process.stderr
    assert size > 1.2e9
    assert int(process.stdout) < 1.15 * size / 2 + 200e6
