"""The flags of commands that run or describe an engine, and their conversion to settings. Does not import torch."""

import argparse
from typing import Any

from cluster.config import DRAFT_FACTS, KV_CACHE_DTYPES, ConfigError

TREE_FLAGS = (
    ("num_steps", "speculative_num_steps", "depth of the tree"),
    ("topk", "speculative_eagle_topk", "children per node"),
    ("num_draft_tokens", "speculative_num_draft_tokens", "nodes of the tree, root included"),
)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the engine's flags."""
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help="a draft (EAGLE, EAGLE-3, MTP, an assistant): its folder or its name on a hub; without it, plain decoding",
    )
    for flag, _, text in TREE_FLAGS:
        parser.add_argument(f"--{flag.replace('_', '-')}", type=int, help=text)
    parser.add_argument("--no-speculation", action="store_true", help="ignore --draft")
    dtypes = ["auto", "float64", "float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", choices=dtypes, help="(default: auto, see docs/settings.md)")
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="what the KV caches hold (default: auto, as --dtype)"
    )
    parser.add_argument("--page-size", type=int)
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="most tokens of a request (default: what the model allows)"
    )


SAME_NAME_FLAGS = ("dtype", "kv_cache_dtype", "page_size", "context_length")
"""Flags that have the same names as their settings."""


def given_engine_flags(args: argparse.Namespace) -> list[str]:
    """Return the engine flags that are on the command line."""
    names = ("draft", *(flag for flag, _, _ in TREE_FLAGS), "no_speculation", *SAME_NAME_FLAGS)
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)]


def engine_settings(args: argparse.Namespace, model: str) -> dict[str, object]:
    """Return the settings that the flags give, for `EngineConfig.from_kwargs`. `model` is the target: a folder, or a
    name on a hub.

    Raises:
        ConfigError: flags of the tree are given without --draft.
    """
    same_name_settings = {name: getattr(args, name) for name in SAME_NAME_FLAGS}
    settings: dict[str, object] = {"model_path": model} | {k: v for k, v in same_name_settings.items() if v is not None}
    if args.draft and not args.no_speculation:
        settings["speculative_draft_model_path"] = args.draft
        settings |= {name: value for flag, name, _ in TREE_FLAGS if (value := getattr(args, flag)) is not None}
    elif not args.draft and any(getattr(args, flag) for flag, _, _ in TREE_FLAGS):
        raise ConfigError("--num-steps, --topk and --num-draft-tokens need --draft")
    return settings


def add_override_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --draft-override, the flag that sets `speculative_draft_overrides`."""
    parser.add_argument(
        "--draft-override", action="append", default=[], metavar="FACT=VALUE", help=f"one of {', '.join(DRAFT_FACTS)}"
    )


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """Return the setting `speculative_draft_overrides` that `fact=value` arguments give.

    Raises:
        ConfigError: a fact is unknown or does not take the value.
    """
    overrides: dict[str, Any] = {}
    for argument in arguments:
        fact, _, value = argument.partition("=")
        values = {str(v).lower(): v for v in DRAFT_FACTS.get(fact, ())}
        if value.lower() not in values:
            raise ConfigError(
                f"--draft-override {argument!r}: {fact!r} takes {list(values)}; facts: {list(DRAFT_FACTS)}"
            )
        overrides[fact] = values[value.lower()]
    return overrides
