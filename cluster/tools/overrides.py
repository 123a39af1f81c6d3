"""`--draft-override FACT=VALUE`: the command-line form of the setting `speculative_draft_overrides`."""

import argparse
from typing import Any

from cluster.config import DRAFT_FACTS, ConfigError


def add_override_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --draft-override."""
    parser.add_argument(
        "--draft-override", action="append", default=[], metavar="FACT=VALUE", help=f"one of {', '.join(DRAFT_FACTS)}"
    )


def overrides_of(words: list[str]) -> dict[str, Any]:
    """Return `fact=value` arguments as a value of `speculative_draft_overrides`.

    Raises:
        ConfigError: a fact is unknown or does not take the value.
    """
    made: dict[str, Any] = {}
    for word in words:
        fact, _, value = word.partition("=")
        values = {str(v).lower(): v for v in DRAFT_FACTS.get(fact, ())}
        if value.lower() not in values:
            raise ConfigError(f"--draft-override {word!r}: {fact!r} takes {list(values)}; facts: {list(DRAFT_FACTS)}")
        made[fact] = values[value.lower()]
    return made
