"""`aerie bench grammars`: the cost of a grammar, and the gain of forced nodes, in one run. A forced node is a
node of the draft tree with the only token that the grammar allows there.

The same prompts run in four ways:

- free: without a grammar.
- masks: with a schema, by token bitmasks only.
- forced: with forced nodes where they cost little (the default).
- eight: with eight forced nodes in every step.

Free output has another accept length, so steps per second are compared. The time to the first token is measured
separately and subtracted, because the numbers of steps differ. Contenders take turns; ratios are taken within a repeat.
Then `cluster.bench.real_sized` measures the cost with vocabularies of real models' sizes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.bench import real_sized
from cluster.bench.goals import Goal
from cluster.bench.pair import DEFAULT, Pair
from cluster.bench.report import Say, machine, median, ratio, table
from cluster.bench.runs import Steady, params_of, steady_steps
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.grammar.asked import Grammar
from cluster.grammar.vocabulary import Vocabulary
from cluster.grammar.worker import Worker
from cluster.request import RequestParams
from cluster.tokenizer.tokenizer import TextTokenizer

GOAL_COST, GOAL_GAIN = 0.95, 1.2
BATCHES = (1, 8)
TEMPERATURES = (0.0, 0.8)
ITEMS = 64
NAMES = (
    ("customer_identifier", "shipping_address_line", "preferred_language", "subscription_status"),
    ("temperature_celsius", "relative_humidity", "measurement_station", "observation_status"),
    ("repository_owner", "default_branch_name", "continuous_integration", "license_identifier"),
    ("account_holder_name", "transaction_amount", "transaction_currency", "settlement_status"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement: `prompts` of `prompt_tokens` tokens, answers of at most `new_tokens` tokens. `real` is
    the size of the measurement `real_sized`.
    """

    prompts: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 160
    repeats: int = 5
    real: real_sized.Size = real_sized.FULL


QUICK = Size(prompts=4, new_tokens=40, repeats=1, real=real_sized.QUICK)


def schema_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the schema of a list of objects with these members: strings, integers and an enum. The list must be longer
    than any answer, so all requests of a batch reach `new_tokens`, as free output does.
    """
    kinds = ({"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 999})
    members: dict[str, Any] = {name: kinds[at % 2] for at, name in enumerate(names[:-1])}
    members[names[-1]] = {"enum": ["pending_confirmation", "completed_successfully"]}
    record = {"type": "object", "properties": members, "required": list(names), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": ITEMS, "maxItems": ITEMS}


def compiled(pair: Pair, config: EngineConfig, compact: bool) -> list[str]:
    """Return the schemas of all `NAMES`, compiled for the pair's vocabulary."""
    engine = build_engine(config)
    tokenizer, ends = TextTokenizer.load(pair.target), engine.info().eos_token_ids
    worker = Worker(Vocabulary.of(tokenizer, engine.info().vocab_size, ends))
    return [worker.compile(Grammar("json_schema", json.dumps(schema_of(names)), compact)) for names in NAMES]


def measure(pair: Pair, size: Size = Size(), say: Say = print) -> dict[str, Any]:
    """Run everything and return the figures, JSON-ready."""
    config = pair.config(DEFAULT, size.prompts)
    prompts = pair.prompts(size.prompts, size.prompt_tokens)
    engines = {
        "free": build_engine(config),
        "masks": build_engine(config.model_copy(update={"speculative_forced_tokens": 0})),
        "forced": build_engine(config),
        "eight": build_engine(config.model_copy(update={"speculative_forced_rows": 8 * size.prompts})),
    }
    rows = []
    for compact in (False, True):
        grammars = compiled(pair, config, compact)
        for temperature in TEMPERATURES:
            for batch in BATCHES:
                say(f"grammars: temperature {temperature}, batch {batch}{', compact' if compact else ''}")
                runs: dict[str, list[Steady]] = {name: [] for name in engines}
                for repeat in range(size.repeats + 1):
                    for name in list(engines)[:: -1 if repeat % 2 else 1]:
                        held = grammars if name != "free" else [None]
                        params = [_params(size, temperature, at, held[at % len(held)]) for at in range(len(prompts))]
                        runs[name].append(steady_steps(engines[name], prompts, params, batch))
                rows.append({"temperature": temperature, "batch": batch, "compact": compact} | _figures(runs))
    real = real_sized.measure(size.real, say)
    return {
        "what": "grammars",
        "machine": machine(),
        "identical": all(row["identical"] for row in rows),
        "rows": rows,
        "real_vocabularies": real,
    }


def _params(size: Size, temperature: float, seed: int, grammar: str | None) -> RequestParams:
    params = params_of(size.new_tokens, temperature, seed)
    return params if grammar is None else replace(params, grammar=grammar, ignore_eos=False)


def _figures(runs: dict[str, list[Steady]]) -> dict[str, Any]:
    """Return the figures. The first repeat is a warm-up and is left out."""
    timed = {name: each[1:] for name, each in runs.items()}
    first = {name: each[0].run for name, each in timed.items()}
    accept = {name: run.accept_length for name, run in first.items()}
    costs = zip(timed["free"], timed["masks"], strict=True)
    forced = {name: zip(timed["masks"], timed[name], strict=True) for name in ("forced", "eight")}
    return {
        "accept_length": accept,
        "cost": median([ratio(b.steps_per_second, a.steps_per_second) for a, b in costs]),
        "gain": {name: ratio(accept[name], accept["masks"]) for name in forced},
        "speed": {
            name: median([ratio(b.run.tokens_per_second, a.run.tokens_per_second) for a, b in pairs])
            for name, pairs in forced.items()
        },
        "identical": all(first[name].tokens == first["masks"].tokens for name in forced),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals: steps per second with masks over steps per second without a grammar; the gain in accept length
    by eight forced nodes, for compact output; and the goals of `real_sized`.
    """
    found = []
    for row in result["rows"]:
        what = f"T={row['temperature']:g}, batch {row['batch']}{', compact' if row['compact'] else ''}"
        found.append(Goal(f"steps/s with a grammar over without, {what}", row["cost"], GOAL_COST, True))
        if row["compact"]:
            gain = row["gain"]["eight"]
            found.append(Goal(f"accept length by eight forced nodes, {what}", gain, GOAL_GAIN, True, slack=1.25))
    return [*found, *real_sized.goals(result["real_vocabularies"])]


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    where = result["machine"]
    rows = [
        [
            f"{row['temperature']:g}",
            row["batch"],
            "yes" if row["compact"] else "no",
            f"{row['cost']:.2f}",
            *(f"{row['accept_length'][name]:.2f}" for name in ("free", "masks", "forced", "eight")),
            *(f"{row[what][name]:.2f}" for name in ("forced", "eight") for what in ("gain", "speed")),
            "yes" if row["identical"] else "NO",
        ]
        for row in result["rows"]
    ]
    names = ["T", "batch", "compact", "steps/s", "accept: free", "masks", "forced", "eight"]
    names += ["forced: accept", "tokens/s", "eight: accept", "tokens/s", "same tokens"]
    head = f"grammars: goals {GOAL_COST} of the steps per second without, {GOAL_GAIN} times"
    real = real_sized.show(result["real_vocabularies"])
    return f"{head} the accept length\n{where['cpu']}, {where['cores']} cores\n{table(names, rows)}\n\n{real}"
