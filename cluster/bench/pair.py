"""The subject of a measurement: a target, its draft, held-out prompts, and configs for given trees and batch sizes."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cluster.arch import read_draft, read_target
from cluster.config import ConfigError, EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.models.checkpoint import Checkpoint
from cluster.paths.checkout import CHECKOUT, DEMO_DRAFT, DEMO_TARGET, demo_path
from cluster.train.corpus import heldout_prompts

KV_TOKENS_PER_REQUEST = 512
UNLIMITED_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """A tree shape: depth, children per node, and number of nodes, root included (0 means as many as a chain has). A
    depth of 0 means plain decoding.
    """

    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0

    @property
    def nodes(self) -> int:
        """The number of nodes, root included."""
        return self.num_draft_tokens or self.num_steps + 1

    def __str__(self) -> str:
        if not self.num_steps:
            return "plain"
        if self.topk == 1:
            return f"chain of {self.num_steps}"
        return f"topk {self.topk}, {self.num_steps} levels, {self.nodes} nodes"


def default_tree() -> TreeChoice:
    """Return the tree shape of a config that names an EAGLE-3 draft but sets nothing about the tree."""
    config = EngineConfig(model_path="-", speculative_algorithm="EAGLE3", speculative_draft_model_path="-")
    tree = ResolvedSettings.from_settings(config).shape
    return TreeChoice(tree.num_steps, tree.topk, tree.num_draft_tokens if tree.topk > 1 else 0)


def resolve_folders(target: str | None, draft: str | None, draft_optional: bool = False) -> tuple[str, str]:
    """Return the folders of a target and its draft; a None is replaced by the demo's folder. But the demo's draft fits
    only the demo's target: a target without a draft is allowed only if `draft_optional`; then the returned draft is "",
    which means no speculation.

    Raises:
        ConfigError: a target is given without the draft that it needs, or the demo is needed but not installed.
    """
    if target is not None and draft is None:
        if draft_optional:
            return target, ""
        raise ConfigError("--model needs --draft as well: the demo's draft fits the demo's target only")
    hint = "give --model DIR and --draft DIR"
    return target or demo_path(DEMO_TARGET, hint), draft or demo_path(DEMO_DRAFT, hint)


def short_path(folder: str) -> str:
    """Return the last two parts of the path of a model's folder, which name the model in reports."""
    return "/".join(folder.split("/")[-2:])


PLAIN = TreeChoice(0)
DEFAULT_TREE = default_tree()


@cache
def _tokenizer(target: str) -> Any:
    if not (Path(target) / "tokenizer.json").is_file():
        raise ValueError(f"target {target!r} has no tokenizer.json, which held-out prompts need")
    return AutoTokenizer.from_pretrained(target, local_files_only=True)


@cache
def _prompts(target: str, count: int, length: int) -> list[list[int]]:
    """Return held-out prompts, cached because reading their files takes a second."""
    return heldout_prompts(_tokenizer(target), count, length)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and its draft, with the dtype and the number of torch threads of their engines."""

    target: str = str(CHECKOUT / DEMO_TARGET)
    draft: str = str(CHECKOUT / DEMO_DRAFT)
    dtype: str = "auto"
    num_threads: int | None = None

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return held-out prompts of `length` token ids, cut from files that the demo models were not trained on.

        Raises:
            ValueError: the target has no tokenizer, or this Python has no held-out library file that is long enough.
        """
        return [list(ids) for ids in _prompts(self.target, count, length)]

    def texts(self, count: int, length: int) -> list[str]:
        """Return the prompts that `prompts` returns as text, to send to a server.

        Raises:
            ValueError: as `prompts`.
        """
        return [str(_tokenizer(self.target).decode(ids)) for ids in self.prompts(count, length)]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            ValueError: the target has no tokenizer.
        """
        return [int(token) for token in _tokenizer(self.target).encode(text, add_special_tokens=False)]

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the target's vocabulary."""
        return read_target(self.target).vocab_size

    def config(self, tree: TreeChoice, requests: int) -> EngineConfig:
        """Return the config of an engine for `requests` running requests, whose steps all use the shape `tree`. Prefix
        reuse is off, so that a repeat does all the work again. Chunked prefill is off, so that batches do not depend on
        step costs measured at start.
        """
        settings: dict[str, object] = {
            "model_path": self.target,
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            "max_running_requests": requests,
            "max_total_tokens": requests * KV_TOKENS_PER_REQUEST,
            "chunked_prefill_size": -1,
            "mixed_prefill_size": UNLIMITED_ROWS,
            "disable_radix_cache": True,
            "speculative_mode": "fixed",
        }
        if tree.num_steps:
            draft = read_draft(self.draft, Checkpoint(self.draft).shapes, read_target(self.target))
            settings |= {
                "speculative_algorithm": draft.algorithm,
                "speculative_draft_model_path": self.draft,
                "speculative_num_steps": tree.num_steps,
                "speculative_eagle_topk": tree.topk,
                "speculative_num_draft_tokens": tree.nodes,
            }
        return EngineConfig.from_kwargs(settings)
