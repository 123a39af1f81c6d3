"""Aerie: EAGLE tree speculation on a Ray cluster, in lockstep across data-parallel attention ranks.

`from cluster import LLM, SamplingParams` gives the classes that run a model in this process. They are imported when
they are first used, because they need torch, which many other modules of this package do without.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The module that defines each public name. `__init__.pyi` declares the same names for type checkers and editors.
LAZY_MODULES: dict[str, str] = {
    "LLM": "cluster.offline.llm",
    "CompletionOutput": "cluster.offline.outputs",
    "Logprob": "cluster.offline.outputs",
    "RequestOutput": "cluster.offline.outputs",
    "SamplingParams": "cluster.offline.sampling_params",
    "StructuredOutputsParams": "cluster.offline.sampling_params",
}
__all__ = [*LAZY_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name of `LAZY_MODULES` when it is first used.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = globals()[name] = getattr(import_module(LAZY_MODULES[name]), name)
    return attribute
