"""Checks that all ranks of a gang have the same settings, models and kernels."""

import json

from cluster.arch.resolve import ResolvedConfig
from cluster.config import ConfigError
from cluster.distributed.mesh import Mesh
from cluster.kernels.interface import Kernels

ALIKE = (
    "give it machines of one kind, or set ATEN_CPU_CAPABILITY=avx2 in env_vars of runtime_env if their CPUs differ, "
    "and attention_backend to torch if some have no kernels in C"
)


def same_everywhere(resolved: ResolvedConfig, kernels: Kernels, mesh: Mesh) -> None:
    """Raise `ConfigError` if ranks have different settings or models, or kernels that round differently: the choice of
    experts could then differ between ranks. Numbers of threads and folders may differ between machines.
    """
    places = {"model_path", "tokenizer_path", "speculative_draft_model_path", "speculative_token_map"}
    own = resolved.settings.model_dump(exclude={"num_threads", *places})
    own["kernels"], own["target"] = kernels.digits, repr(resolved.target)
    if resolved.draft is not None:
        own["draft"] = repr((resolved.draft, resolved.sample))
    said = json.dumps(own, sort_keys=True)
    own = json.loads(said)  # as peers read it: JSON turns integer keys into strings
    for rank, text in enumerate(mesh.everyones("config", said)):
        theirs = json.loads(text)
        for name in sorted(own.keys() | theirs.keys()):
            if own.get(name) != theirs.get(name):
                remedy = f"; {ALIKE}" if name == "kernels" else ""
                raise ConfigError(
                    f"{name} is {theirs.get(name)!r} on rank {rank} and {own.get(name)!r} on rank {mesh.rank}; "
                    f"all ranks of a gang need the same settings, models and kernels{remedy}"
                )
