"""What is measured: a target, its draft, held-out prompts, and engine configs that differ in the tree alone."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cluster.arch import read_draft, read_target
from cluster.config import ConfigError, EngineConfig
from cluster.config.tree_shape import tree_shape
from cluster.models.checkpoint import Checkpoint
from cluster.paths.checkout import CHECKOUT, DEMO_DRAFT, DEMO_TARGET, demo_path
from cluster.train.corpus import heldout_prompts

KV_TOKENS_PER_REQUEST = 512
ANY_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """A tree to try: depth, children per node, nodes with the root (0: a chain's). Depth 0 is plain decoding."""

    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0

    @property
    def nodes(self) -> int:
        """All nodes, root included."""
        return self.num_draft_tokens or self.num_steps + 1

    def __str__(self) -> str:
        if not self.num_steps:
            return "plain"
        if self.topk == 1:
            return f"chain of {self.num_steps}"
        return f"topk {self.topk}, {self.num_steps} levels, {self.nodes} nodes"


def shipped() -> TreeChoice:
    """The default tree: that of a config which names a draft and sets nothing about the tree."""
    config = EngineConfig(model_path="-", speculative_algorithm="EAGLE3", speculative_draft_model_path="-")
    tree = tree_shape(config)
    return TreeChoice(tree.num_steps, tree.topk, tree.num_draft_tokens if tree.topk > 1 else 0)


def named(target: str | None, draft: str | None, alone: bool = False) -> tuple[str, str]:
    """The folders of a target and its draft, each the demo's where it is not given; `alone`: a target without a draft
    is measured without speculation, and its draft is "".

    Raises:
        ConfigError: a target that needs a draft without one, or no demo in this installation.
    """
    if target is not None and draft is None:
        if alone:
            return target, ""
        raise ConfigError("--model needs --draft as well: the demo's draft fits the demo's target only")
    instead = "give --model DIR and --draft DIR"
    return target or demo_path(DEMO_TARGET, instead), draft or demo_path(DEMO_DRAFT, instead)


def short_path(folder: str) -> str:
    """The last two parts of a model's folder, by which reports name it."""
    return "/".join(folder.split("/")[-2:])


PLAIN = TreeChoice(0)
DEFAULT = shipped()


@cache
def _tokenizer(target: str) -> Any:
    if not (Path(target) / "tokenizer.json").is_file():
        raise ValueError(f"target {target!r} has no tokenizer.json, which held-out prompts need")
    return AutoTokenizer.from_pretrained(target, local_files_only=True)


@cache
def _prompts(target: str, count: int, length: int) -> list[list[int]]:
    """Held-out prompts, cached: reading the files that they are cut from takes a second."""
    return heldout_prompts(_tokenizer(target), count, length)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft, with the dtype and the torch threads of their engines."""

    target: str = str(CHECKOUT / DEMO_TARGET)
    draft: str = str(CHECKOUT / DEMO_DRAFT)
    dtype: str = "auto"
    num_threads: int | None = None

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Held-out prompts: cut from files that neither model was trained on.

        Raises:
            ValueError: the target has no tokenizer, or this Python comes without its library's source.
        """
        return [list(ids) for ids in _prompts(self.target, count, length)]

    def texts(self, count: int, length: int) -> list[str]:
        """The same prompts as text, for a server.

        Raises:
            ValueError: as `prompts`.
        """
        return [str(_tokenizer(self.target).decode(ids)) for ids in self.prompts(count, length)]

    def config(self, shape: TreeChoice, requests: int) -> EngineConfig:
        """The config of an engine for `requests` at once: without prefix reuse, so that a repeat does all the work
        again, and without chunked prefill, so that the batches do not depend on step costs measured at start.
        """
        settings: dict[str, object] = {
            "model_path": self.target,
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            "max_running_requests": requests,
            "max_total_tokens": requests * KV_TOKENS_PER_REQUEST,
            "chunked_prefill_size": -1,
            "mixed_prefill_size": ANY_ROWS,
            "disable_radix_cache": True,
        }
        if shape.num_steps:
            draft = read_draft(self.draft, Checkpoint(self.draft).shapes, read_target(self.target))
            settings |= {
                "speculative_algorithm": draft.algorithm,
                "speculative_draft_model_path": self.draft,
                "speculative_num_steps": shape.num_steps,
                "speculative_eagle_topk": shape.topk,
                "speculative_num_draft_tokens": shape.nodes,
            }
        return EngineConfig.from_kwargs(settings)
