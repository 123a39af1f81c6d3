"""Checks that all ranks of a gang have the same settings, models and kernels."""

import json

from cluster.arch.resolve import ResolvedConfig
from cluster.config import ConfigError
from cluster.distributed.mesh import Mesh
from cluster.kernels.interface import Kernels

KERNELS_REMEDY = (
    "give it machines of one kind, or set ATEN_CPU_CAPABILITY=avx2 in env_vars of runtime_env if their CPUs differ, "
    "and attention_backend to torch if some have no kernels in C"
)


def check_rank_agreement(resolved: ResolvedConfig, kernels: Kernels, mesh: Mesh) -> None:
    """Raise `ConfigError` if ranks have different settings or models, or kernels that round differently. With such
    kernels, ranks could choose different experts. Only `num_threads` and the paths of models, tokenizer and token map
    may differ between machines.
    """
    path_settings = {"model_path", "tokenizer_path", "speculative_draft_model_path", "speculative_token_map"}
    own_facts = resolved.settings.model_dump(exclude={"num_threads", *path_settings})
    own_facts["kernels"], own_facts["target"] = kernels.numerics, repr(resolved.target)
    if resolved.draft is not None:
        own_facts["draft"] = repr((resolved.draft, resolved.sample))
    own_json = json.dumps(own_facts, sort_keys=True)
    own_facts = json.loads(own_json)  # as peers read it: JSON turns integer keys into strings
    for rank, rank_json in enumerate(mesh.all_gather_text("config", own_json)):
        rank_facts = json.loads(rank_json)
        for name in sorted(own_facts.keys() | rank_facts.keys()):
            if own_facts.get(name) != rank_facts.get(name):
                remedy = f"; {KERNELS_REMEDY}" if name == "kernels" else ""
                raise ConfigError(
                    f"{name} is {rank_facts.get(name)!r} on rank {rank} and {own_facts.get(name)!r} on rank "
                    f"{mesh.rank}; all ranks of a gang need the same settings, models and kernels{remedy}"
                )
