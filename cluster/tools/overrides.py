"""`--draft-override FACT=VALUE`: `speculative_draft_overrides` on a command line."""

import argparse
from typing import Any

from cluster.config import DRAFT_FACTS, ConfigError


def add_override_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    parser.add_argument(
        "--draft-override", action="append", default=[], metavar="FACT=VALUE", help=f"one of {', '.join(DRAFT_FACTS)}"
    )


def overrides_of(words: list[str]) -> dict[str, Any]:
    """`fact=value` words as `speculative_draft_overrides`.

    Raises:
        ConfigError: an unknown fact, or a value that it does not take.
    """
    made: dict[str, Any] = {}
    for word in words:
        fact, _, value = word.partition("=")
        values = {str(v).lower(): v for v in DRAFT_FACTS.get(fact, ())}
        if value.lower() not in values:
            raise ConfigError(f"--draft-override {word!r}: {fact!r} takes {list(values)}; facts: {list(DRAFT_FACTS)}")
        made[fact] = values[value.lower()]
    return made
