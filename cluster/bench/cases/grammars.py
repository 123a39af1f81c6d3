"""`aerie bench grammars`: the cost of a grammar, and the gain of forced nodes, in one run. A forced node is a
node of the draft tree with the only token that the grammar allows there.

The same prompts run in four ways:

- free: without a grammar.
- masks: with a schema, by token bitmasks only.
- forced: with a schema, and as many forced nodes as the default settings allow; they cost little.
- eight: with a schema, and up to eight forced nodes in every tree.

Free output has another accept length than output with a schema. So the cost of a grammar is the ratio of steps per
second, not of tokens per second. The time until the first token is measured separately and subtracted, because the
numbers of steps differ. Contenders take turns; ratios are taken within a repeat. Then `cluster.bench.real_sized`
measures the cost with vocabularies as large as those of real models.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.bench import real_sized
from cluster.bench.goals import Goal
from cluster.bench.pair import DEFAULT_TREE, ModelPair
from cluster.bench.report import LogProgress, machine_info, median, ratio, table
from cluster.bench.runs import TimedDecoding, fixed_length_params, time_decoding
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
ITEM_COUNT = 64
MEMBER_NAMES = (
    ("customer_identifier", "shipping_address_line", "preferred_language", "subscription_status"),
    ("temperature_celsius", "relative_humidity", "measurement_station", "observation_status"),
    ("repository_owner", "default_branch_name", "continuous_integration", "license_identifier"),
    ("account_holder_name", "transaction_amount", "transaction_currency", "settlement_status"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement: the number of prompts, the tokens of each prompt, the most tokens of an answer, and
    the recorded repeats. `real` is the size of the measurement `cluster.bench.real_sized`.
    """

    prompts: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 160
    repeats: int = 5
    real: real_sized.Size = real_sized.FULL


QUICK = Size(prompts=4, new_tokens=40, repeats=1, real=real_sized.QUICK)


def list_schema(names: Sequence[str]) -> dict[str, Any]:
    """Return the schema of a list of objects with these members: strings, integers and an enum. The list has
    `ITEM_COUNT` items, more than an answer can hold. So all requests reach `new_tokens` tokens, as without a grammar.
    """
    value_schemas = ({"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 999})
    members: dict[str, Any] = {name: value_schemas[index % 2] for index, name in enumerate(names[:-1])}
    members[names[-1]] = {"enum": ["pending_confirmation", "completed_successfully"]}
    record = {"type": "object", "properties": members, "required": list(names), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": ITEM_COUNT, "maxItems": ITEM_COUNT}


def compile_schemas(pair: ModelPair, config: EngineConfig, compact: bool) -> list[str]:
    """Return a schema for each of `MEMBER_NAMES`, compiled for the pair's vocabulary. If `compact`, the schemas allow
    no white space between JSON tokens.
    """
    engine = build_engine(config)
    tokenizer, eos_token_ids = TextTokenizer.load(pair.target), engine.info().eos_token_ids
    worker = Worker(Vocabulary.from_tokenizer(tokenizer, engine.info().vocab_size, eos_token_ids))
    return [worker.compile(Grammar("json_schema", json.dumps(list_schema(names)), compact)) for names in MEMBER_NAMES]


def measure(pair: ModelPair, size: Size = Size(), log_progress: LogProgress = print) -> dict[str, Any]:
    """Run all contenders, then `real_sized`, and return the figures, JSON-ready."""
    config = pair.config(DEFAULT_TREE, size.prompts)
    prompts = pair.prompts(size.prompts, size.prompt_tokens)
    engines = {
        "free": build_engine(config),
        "masks": build_engine(config.model_copy(update={"speculative_forced_tokens": 0})),
        "forced": build_engine(config),
        "eight": build_engine(config.model_copy(update={"speculative_forced_rows": 8 * size.prompts})),
    }
    rows = []
    for compact in (False, True):
        grammars = compile_schemas(pair, config, compact)
        for temperature in TEMPERATURES:
            for batch in BATCHES:
                log_progress(f"grammars: temperature {temperature}, batch {batch}{', compact' if compact else ''}")
                runs: dict[str, list[TimedDecoding]] = {name: [] for name in engines}
                for repeat in range(size.repeats + 1):
                    for name in list(engines)[:: -1 if repeat % 2 else 1]:
                        run_grammars = grammars if name != "free" else [None]
                        params = [
                            _request_params(size, temperature, index, run_grammars[index % len(run_grammars)])
                            for index in range(len(prompts))
                        ]
                        runs[name].append(time_decoding(engines[name], prompts, params, batch))
                rows.append({"temperature": temperature, "batch": batch, "compact": compact} | _figures(runs))
    real_rows = real_sized.measure(size.real, log_progress)
    return {
        "what": "grammars",
        "machine": machine_info(),
        "identical": all(row["identical"] for row in rows),
        "rows": rows,
        "real_vocabularies": real_rows,
    }


def _request_params(size: Size, temperature: float, seed: int, grammar: str | None) -> RequestParams:
    params = fixed_length_params(size.new_tokens, temperature, seed)
    return params if grammar is None else replace(params, grammar=grammar, ignore_eos=False)


def _figures(runs: dict[str, list[TimedDecoding]]) -> dict[str, Any]:
    """Return the figures of one load from the runs of each contender. Each first run is a warm-up and is left out."""
    timed_runs = {name: name_runs[1:] for name, name_runs in runs.items()}
    first_runs = {name: name_runs[0].run for name, name_runs in timed_runs.items()}
    accept_lengths = {name: run.accept_length for name, run in first_runs.items()}
    free_and_masked = zip(timed_runs["free"], timed_runs["masks"], strict=True)
    forced_pairs = {name: zip(timed_runs["masks"], timed_runs[name], strict=True) for name in ("forced", "eight")}
    return {
        "accept_length": accept_lengths,
        "cost": median([ratio(b.steps_per_second, a.steps_per_second) for a, b in free_and_masked]),
        "gain": {name: ratio(accept_lengths[name], accept_lengths["masks"]) for name in forced_pairs},
        "speed": {
            name: median([ratio(b.run.tokens_per_second, a.run.tokens_per_second) for a, b in pairs])
            for name, pairs in forced_pairs.items()
        },
        "identical": all(first_runs[name].tokens == first_runs["masks"].tokens for name in forced_pairs),
    }


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals: steps per second with masks over steps per second without a grammar; the gain in accept length
    by eight forced nodes, for compact output; and the goals of `real_sized`.
    """
    goal_list = []
    for row in result["rows"]:
        setting = f"T={row['temperature']:g}, batch {row['batch']}{', compact' if row['compact'] else ''}"
        goal_list.append(Goal(f"steps/s with a grammar over without, {setting}", row["cost"], GOAL_COST, True))
        if row["compact"]:
            gain = row["gain"]["eight"]
            goal_list.append(Goal(f"accept length by eight forced nodes, {setting}", gain, GOAL_GAIN, True, slack=1.25))
    return [*goal_list, *real_sized.goals(result["real_vocabularies"])]


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    machine = result["machine"]
    rows = [
        [
            f"{row['temperature']:g}",
            row["batch"],
            "yes" if row["compact"] else "no",
            f"{row['cost']:.2f}",
            *(f"{row['accept_length'][name]:.2f}" for name in ("free", "masks", "forced", "eight")),
            *(f"{row[measure][name]:.2f}" for name in ("forced", "eight") for measure in ("gain", "speed")),
            "yes" if row["identical"] else "NO",
        ]
        for row in result["rows"]
    ]
    headers = ["T", "batch", "compact", "steps/s", "accept: free", "masks", "forced", "eight"]
    headers += ["forced: accept", "tokens/s", "eight: accept", "tokens/s", "same tokens"]
    title = f"grammars: goals {GOAL_COST} of the steps per second without, {GOAL_GAIN} times"
    real_text = real_sized.show(result["real_vocabularies"])
    return (
        f"{title} the accept length\n{machine['cpu']}, {machine['cores']} cores\n{table(headers, rows)}\n\n{real_text}"
    )
