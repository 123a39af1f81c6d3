"""`aerie probe-draft`: find the reading of a draft with the highest accept length. A reading is one way to interpret
the draft's tensors, if the tensors allow several.

The tensors leave some facts of a draft open (`DRAFT_FACTS`). For each open fact, every value is tried on a few short
prompts with fixed seeds, so all readings draft for the same text. A value other than that of the draft's config or
format is recommended only if it makes the accept length more than `MIN_IMPROVEMENT` times as high.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cluster.arch.draft.sample import SAMPLE_FILE
from cluster.arch.hub import fetch
from cluster.config import DRAFT_FACTS, ConfigError, EngineConfig
from cluster.engine.build import build_engine
from cluster.offline.stepping import complete
from cluster.request import Request, RequestParams
from cluster.tools.sample_draft import pair_settings

PROMPTS = (
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "The capital of France is Paris, and the capital of Italy is",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "Once upon a time there was a king who had three daughters. The youngest of them",
    "import argparse\n\nparser = argparse.ArgumentParser()\nparser.add_argument(",
    "To boil an egg, first bring the water to",
)
MAX_NEW_TOKENS = 64
NUM_STEPS = 4
MIN_IMPROVEMENT = 1.04
"""Another value is used only if its accept length is more than `MIN_IMPROVEMENT` times the best so far. Smaller
differences say little: the accept length of the demo draft changes by up to 2%, up or down, between readings that
differ by one aux layer.
"""


class Reading(NamedTuple):
    """The result of reading the draft with `overrides`: the mean accept length, or 0.0 and the error if the draft
    cannot be read.
    """

    overrides: dict[str, Any]
    accept_length: float
    error: str = ""


def probe_draft(draft: str, target: str, algorithm: str | None, report: Callable[[Reading], None]) -> dict[str, Any]:
    """Return the overrides to set: the values that differ from the draft's config or format and make the accept length
    more than `MIN_IMPROVEMENT` times as high. It is empty if there are none. Facts are tried one after the other; while
    one is tried, the others have their best values so far. `report` is called with every reading.

    Raises:
        ConfigError: the pair cannot be served or has no tokenizer, or the draft has a sample, which settles its facts.
    """
    config = fetch(EngineConfig.from_kwargs(pair_settings(draft, target, algorithm)))
    target, draft = config.model_path, config.speculative_draft_model_path or draft
    if (Path(draft) / SAMPLE_FILE).exists():
        raise ConfigError(
            f"draft {draft!r} has a {SAMPLE_FILE}, which settles how it is read; remove it to probe anyway"
        )
    best, facts = _measure_reading(draft, target, algorithm, {})
    report(best)
    if best.error:
        raise ConfigError(best.error)
    for fact, value in facts.items():
        for candidate in DRAFT_FACTS.get(fact, ()):
            if candidate == value:
                continue
            reading, _ = _measure_reading(draft, target, algorithm, {**best.overrides, fact: candidate})
            report(reading)
            if reading.accept_length > MIN_IMPROVEMENT * best.accept_length:
                best = reading
    return best.overrides


def _measure_reading(
    draft: str, target: str, algorithm: str | None, overrides: dict[str, Any]
) -> tuple[Reading, dict[str, Any]]:
    """Generate with the draft read by `overrides`. Return the reading, and the value of each fact that the tensors
    leave open (no facts if the draft cannot be read).
    """
    settings = pair_settings(draft, target, algorithm) | {
        "max_running_requests": len(PROMPTS),
        "context_length": 2 * MAX_NEW_TOKENS + 64,
        "speculative_num_steps": NUM_STEPS,
        "speculative_draft_overrides": overrides,
    }
    try:
        engine = build_engine(EngineConfig.from_kwargs(settings))
    except ConfigError as error:
        return Reading(overrides, 0.0, str(error)), {}
    if engine.tokenizer is None:
        raise ConfigError(f"target {target!r} has no tokenizer.json, which the probe's prompts need")
    params = [RequestParams(seed=seed, max_tokens=MAX_NEW_TOKENS, ignore_eos=True) for seed in range(len(PROMPTS))]
    prompts = [tuple(engine.tokenizer.encode(text)[-MAX_NEW_TOKENS:]) for text in PROMPTS]
    complete(
        engine,
        [
            Request(prompt, prompt_ids, request_params)
            for prompt, prompt_ids, request_params in zip(PROMPTS, prompts, params, strict=True)
        ],
    )
    draft_info = engine.info().draft
    assert draft_info is not None, "a draft was asked for"
    facts = {fact: chosen.value for fact, chosen in draft_info.choices.items()}
    return Reading(overrides, engine.status().accept_length), facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie probe-draft`."""
    parser.add_argument("draft", metavar="DRAFT", help="the draft: its folder, or its name on a hub")
    parser.add_argument("--target", required=True, metavar="MODEL", help="its target: a folder or a name on a hub")
    parser.add_argument("--algorithm", help="its speculative_algorithm (default: what its folder holds)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print every reading, and the value to set for `speculative_draft_overrides`."""
    readings: list[Reading] = []

    def report(reading: Reading) -> None:
        readings.append(reading)
        if not args.json:
            print(f"{_describe(reading.overrides):<50} {reading.error or f'accept length {reading.accept_length:.3f}'}")

    best = probe_draft(args.draft, args.target, args.algorithm, report)
    if args.json:
        print(json.dumps({"readings": [r._asdict() for r in readings], "speculative_draft_overrides": best}))
    elif best:
        print(f"set speculative_draft_overrides: {json.dumps(best)}")
    else:
        print(f"no other reading is better by {MIN_IMPROVEMENT - 1:.0%}: leave speculative_draft_overrides as it is")
    return 0


def _describe(overrides: dict[str, Any]) -> str:
    return ", ".join(f"{fact} {value}" for fact, value in overrides.items()) or "as its config and format say"
