"""The cost of grammars with vocabularies of real models' sizes: the seconds that a grammar adds to its first and to a
later request, the bytes of a grammar that a rank receives, and the time of a step of eight requests.

Model and tokenizer are random (`random_models`, `random_vocabulary`). Requests are sent to a server one at a time.
Requests without and with a grammar alternate, so a cost is a difference within one run. Steps are timed on an engine in
this process, alternately with and without grammars.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cluster.bench.goals import Goal
from cluster.bench.pair import DEFAULT_TREE, ModelPair
from cluster.bench.random_models import LLAMA_CONFIG, random_prompts, write_pair
from cluster.bench.random_vocabulary import (
    BYTE_LEVEL_SIZE,
    SENTENCE_PIECE_SIZE,
    STOP_TOKEN_ID,
    random_tokens,
    write_tokenizer,
)
from cluster.bench.report import LogProgress, median, ratio, table
from cluster.bench.runs import fixed_length_params, time_decoding
from cluster.bench.server import ServerProcess
from cluster.bench.streams import served_model
from cluster.bench.wire import post
from cluster.chat.formats.choose import FORMATS
from cluster.engine import build_engine
from cluster.grammar.asked import Grammar
from cluster.grammar.vocabulary import Vocabulary
from cluster.grammar.worker import Worker

GOAL_FIRST_S, GOAL_LATER_S, GOAL_BYTES, GOAL_STEP = 0.6, 0.05, 2_000_000, 1.05
BATCH = 8
ANSWER_TOKENS = 8  # tokens of an answer of the server
ITEM_COUNT = 64  # least items of a list while steps are timed: more than fit, so no answer ends early
MEMBER_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "string", "format": "date-time"},
    {"type": "number"},
    {"enum": ["open", "pending", "closed"]},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "integer", "minimum": 0, "maximum": 150},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": "string", "maxLength": 200},
    {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]},
)


@dataclass(frozen=True, slots=True)
class Size:
    """The vocabulary sizes, the model's width and layers, the repeats, and `new_tokens` per request of timed steps."""

    vocab_sizes: tuple[int, ...] = (BYTE_LEVEL_SIZE, SENTENCE_PIECE_SIZE)
    hidden: int = 640
    layers: int = 18
    repeats: int = 5
    new_tokens: int = 64


FULL = Size()
QUICK = Size(vocab_sizes=(16_384,), hidden=64, layers=4, repeats=2, new_tokens=16)


def measure(size: Size, log_progress: LogProgress) -> list[dict[str, Any]]:
    """Return the figures of each vocabulary size."""
    return [_measure_vocabulary(vocab_size, size, log_progress) for vocab_size in size.vocab_sizes]


def show(rows: list[dict[str, Any]]) -> str:
    """Return the figures that have goals, and the goals, as a table."""
    cells = [[goal.name, f"{goal.value:.3f}", f"at most {goal.bound:g}"] for goal in goals(rows)]
    return "real vocabularies: seconds beyond a plain request's, and steps\n" + table(
        ("what", "measured", "goal"), cells
    )


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return goals: bounds of the time that a grammar adds to a request and to a step, and of a grammar's bytes."""
    goal_list = []
    for row in rows:
        for name, costs in row["requests"].items():
            for request, goal in (("first", GOAL_FIRST_S), ("known", GOAL_LATER_S)):
                goal_list.append(Goal(f"{row['ids']} ids, {name}, {request}, s", costs[request], goal))
        for name, count in row["bytes"].items():
            goal_list.append(Goal(f"{row['ids']} ids, {name}, bytes to a rank", count, GOAL_BYTES, slack=1))
        goal_list.append(
            Goal(f"{row['ids']} ids, a step of {BATCH} with grammars, times one without", row["step"], GOAL_STEP)
        )
    return goal_list


def object_schema(count: int, prefix: str = "field") -> dict[str, Any]:
    """Return the schema of an object with `count` members of eleven kinds; their names begin with `prefix`."""
    names = [f"{prefix}_{index}" for index in range(count)]
    members = {name: MEMBER_SCHEMAS[index % len(MEMBER_SCHEMAS)] for index, name in enumerate(names)}
    return {"type": "object", "properties": members, "required": names, "additionalProperties": False}


def _measure_vocabulary(vocab_size: int, size: Size, log_progress: LogProgress) -> dict[str, Any]:
    tokens = random_tokens(vocab_size)
    with _model_folders(tokens, size) as pair:
        log_progress(f"grammars: {vocab_size} ids, requests to a server")
        requests = asyncio.run(_request_costs(pair, size))
        log_progress(f"grammars: {vocab_size} ids, steps of {BATCH}")
        worker = Worker(Vocabulary(tuple(tokens), (STOP_TOKEN_ID,)))
        return {
            "ids": vocab_size,
            "requests": requests,
            "bytes": {name: len(worker.compile(grammar)) for name, grammar in _grammars().items()},
            "step": _step_ratio(pair, worker, size),
        }


@contextmanager
def _model_folders(tokens: list[bytes], size: Size) -> Iterator[ModelPair]:
    """Write a target, its draft and its tokenizer to a temporary folder. `FULL` has the sizes of Gemma-3 270M, except
    the heads, which are smaller.
    """
    shape = LLAMA_CONFIG | {"vocab_size": len(tokens), "hidden_size": size.hidden, "num_hidden_layers": size.layers}
    shape |= {"intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    with TemporaryDirectory(prefix="aerie-real-sized-") as folder:
        model = write_pair(Path(folder), shape, None, torch.device("cpu"))
        write_tokenizer(Path(model.target), tokens, byte_level=len(tokens) < SENTENCE_PIECE_SIZE)
        yield ModelPair(model.target, model.draft)


def _grammars() -> dict[str, Grammar]:
    """Return, by name, the grammars whose compiled text is measured in bytes. Ranks receive the compiled text."""
    form = FORMATS["hermes"].calls_form({"do": object_schema(20)}, True)
    return {
        "json_object": Grammar("json_object"),
        "schema of 20 fields": Grammar("json_schema", json.dumps(object_schema(20))),
        "a required tool": Grammar("chat", json.dumps({"type": "structural_tag", "format": form})),
    }


def _request_fields(prefix: str) -> dict[str, dict[str, Any]]:
    """Return the fields of a request for each grammar, by the grammar's name. `prefix` is part of every grammar, so a
    new prefix gives grammars that no cache holds.
    """

    def tools(*names: str) -> list[dict[str, Any]]:
        functions = ({"name": name, "parameters": object_schema(20, f"{prefix}_{name}")} for name in names)
        return [{"type": "function", "function": function} for function in functions]

    def schema(value: dict[str, Any]) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": value}}}

    object_list = {"type": "array", "items": object_schema(3, f"{prefix}_item")}
    tool_choice = {"type": "function", "function": {"name": "one"}}
    return {
        "schema of 3 fields": schema(object_schema(3, prefix)),
        "schema of 20 fields": schema(object_schema(20, prefix)),
        "list of objects": schema(object_list),
        "tool_choice required": {"tools": tools("one", "two"), "tool_choice": "required"},
        "a named tool": {"tools": tools("one"), "tool_choice": tool_choice},
    }


async def _request_costs(pair: ModelPair, size: Size) -> dict[str, dict[str, float]]:
    """Return, by the grammar's name, the median seconds that a grammar adds to a request: `first` when the server sees
    the grammar for the first time, `known` at the second time.
    """
    settings = [f"model={pair.target}", f"speculative_draft_model_path={pair.draft}", "tool_call_parser=hermes"]
    costs_by_grammar: dict[str, dict[str, list[float]]] = {}
    with ServerProcess(settings) as server:
        model = served_model(server.port)

        async def seconds(body: Mapping[str, Any]) -> float:
            messages = [{"role": "user", "content": "go"}]
            fixed = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
            reply = await post(server.port, "/v1/chat/completions", fixed | dict(body))
            if reply.status != 200:
                raise ValueError(f"a request was answered {reply.status}: {reply.body[:300]!r} {reply.error}")
            return reply.seconds

        async def record_cost(name: str, body: Mapping[str, Any]) -> None:
            same_prompt = ("tools", body.get("tools")), ("tool_choice", "auto")
            plain = dict(same_prompt) if "tools" in body else {}
            times = [await seconds(each) for each in (plain, body, plain, body, plain)]
            plain_seconds = median(times[::2])
            costs = costs_by_grammar.setdefault(name, {"first": [], "known": []})
            costs["first"].append(times[1] - plain_seconds)
            costs["known"].append(times[3] - plain_seconds)

        await seconds({"structured_outputs": {"choice": ["a", "b"]}})  # warm-up of the process that compiles
        await record_cost("json_object", {"response_format": {"type": "json_object"}})
        for repeat in range(size.repeats):
            for name, body in _request_fields(f"repeat{repeat}").items():
                await record_cost(name, body)
    return {name: {what: median(times) for what, times in each.items()} for name, each in costs_by_grammar.items()}


def _step_ratio(pair: ModelPair, worker: Worker, size: Size) -> float:
    """Return the ratio of the time of a step in which all requests have grammars to that of a step without grammars."""
    config = pair.config(DEFAULT_TREE, BATCH).model_copy(update={"speculative_forced_tokens": 0})
    engine = build_engine(config)
    prompts = random_prompts(engine.info().vocab_size, BATCH, 32)
    free_params = [fixed_length_params(size.new_tokens, seed=index) for index in range(BATCH)]
    schemas = (
        {"type": "array", "items": object_schema(4, f"m{index}"), "minItems": ITEM_COUNT} for index in range(BATCH)
    )
    texts = [worker.compile(Grammar("json_schema", json.dumps(each))) for each in schemas]
    grammar_params = [
        replace(params, grammar=text, ignore_eos=False) for params, text in zip(free_params, texts, strict=True)
    ]
    ratios = []
    for repeat in range(size.repeats + 1):
        speeds = {}
        for name, params in [("free", free_params), ("grammar", grammar_params)][:: -1 if repeat % 2 else 1]:
            speeds[name] = time_decoding(engine, prompts, params, BATCH).steps_per_second
        ratios.append(ratio(speeds["free"], speeds["grammar"]))
    return median(ratios[1:])
