"""The cost of grammars with vocabularies of real models' sizes: seconds of the first and of a later request with a
grammar, bytes sent to a rank, and the time of a step of eight requests.

Model and tokenizer are random (`random_models`, `random_vocabulary`). A server answers requests one at a time. Requests
without and with a grammar alternate, so a cost is a difference within one run. Steps run on an engine in this process,
alternately with and without grammars.
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
from cluster.bench.pair import DEFAULT, Pair
from cluster.bench.random_models import LLAMA, random_prompts, write_pair
from cluster.bench.random_vocabulary import BYTE_LEVEL, SENTENCE_PIECE, STOP, made_up_tokens, write_tokenizer
from cluster.bench.report import Say, median, ratio, table
from cluster.bench.runs import params_of, steady_steps
from cluster.bench.server import ServerProcess
from cluster.bench.streams import served_model
from cluster.bench.wire import post
from cluster.chat.formats.choose import FORMATS
from cluster.engine import build_engine
from cluster.grammar.asked import Grammar
from cluster.grammar.vocabulary import Vocabulary
from cluster.grammar.worker import Worker

GOAL_FIRST_S, GOAL_KNOWN_S, GOAL_BYTES, GOAL_STEP = 0.6, 0.05, 2_000_000, 1.05
BATCH = 8
ANSWER = 8  # tokens of a timed answer
ITEMS = 64  # items of a list: more than any answer can hold, so no answer ends early
FIELDS: tuple[dict[str, Any], ...] = (
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
    """The vocabulary sizes `ids`, the model's width and layers, the repeats, and the tokens of a measured answer."""

    ids: tuple[int, ...] = (BYTE_LEVEL, SENTENCE_PIECE)
    hidden: int = 640
    layers: int = 18
    repeats: int = 5
    new_tokens: int = 64


FULL = Size()
QUICK = Size(ids=(16_384,), hidden=64, layers=4, repeats=2, new_tokens=16)


def measure(size: Size, say: Say) -> list[dict[str, Any]]:
    """Return the figures of each vocabulary."""
    return [_measured(ids, size, say) for ids in size.ids]


def show(rows: list[dict[str, Any]]) -> str:
    """Return the figures and their goals as a table."""
    cells = [[goal.what, f"{goal.value:.3f}", f"at most {goal.bound:g}"] for goal in goals(rows)]
    return "real vocabularies: seconds beyond a plain request's, and steps\n" + table(
        ("what", "measured", "goal"), cells
    )


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals: the time that a grammar adds to a request and to a step, and the bytes of a sent grammar."""
    found = []
    for row in rows:
        for name, each in row["requests"].items():
            for what, goal in (("first", GOAL_FIRST_S), ("known", GOAL_KNOWN_S)):
                found.append(Goal(f"{row['ids']} ids, {name}, {what}, s", each[what], goal))
        for name, count in row["bytes"].items():
            found.append(Goal(f"{row['ids']} ids, {name}, bytes to a rank", count, GOAL_BYTES, slack=1))
        found.append(
            Goal(f"{row['ids']} ids, a step of {BATCH} with grammars, times one without", row["step"], GOAL_STEP)
        )
    return found


def schema_of(count: int, mark: str = "field") -> dict[str, Any]:
    """Return the schema of an object with `count` members of eleven kinds; their names begin with `mark`."""
    names = [f"{mark}_{at}" for at in range(count)]
    members = {name: FIELDS[at % len(FIELDS)] for at, name in enumerate(names)}
    return {"type": "object", "properties": members, "required": names, "additionalProperties": False}


def _measured(ids: int, size: Size, say: Say) -> dict[str, Any]:
    tokens = made_up_tokens(ids)
    with _model(tokens, size) as pair:
        say(f"grammars: {ids} ids, requests to a server")
        requests = asyncio.run(_requests(pair, size))
        say(f"grammars: {ids} ids, steps of {BATCH}")
        worker = Worker(Vocabulary(tuple(tokens), (STOP,)))
        return {
            "ids": ids,
            "requests": requests,
            "bytes": {name: len(worker.compile(grammar)) for name, grammar in _grammars().items()},
            "step": _step(pair, worker, size),
        }


@contextmanager
def _model(tokens: list[bytes], size: Size) -> Iterator[Pair]:
    """Write a target, its draft and its tokenizer to a temporary folder; `FULL` has Gemma-3 270M's sizes."""
    shape = LLAMA | {"vocab_size": len(tokens), "hidden_size": size.hidden, "num_hidden_layers": size.layers}
    shape |= {"intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    with TemporaryDirectory(prefix="aerie-real-sized-") as folder:
        made = write_pair(Path(folder), shape, None, torch.device("cpu"))
        write_tokenizer(Path(made.target), tokens, byte_level=len(tokens) < SENTENCE_PIECE)
        yield Pair(made.target, made.draft)


def _grammars() -> dict[str, Grammar]:
    """Return the grammars whose compiled text, which ranks receive, is measured in bytes."""
    form = FORMATS["hermes"].written({"do": schema_of(20)}, True)
    return {
        "json_object": Grammar("json_object"),
        "schema of 20 fields": Grammar("json_schema", json.dumps(schema_of(20))),
        "a required tool": Grammar("chat", json.dumps({"type": "structural_tag", "format": form})),
    }


def _asking(mark: str) -> dict[str, dict[str, Any]]:
    """Return fields of requests, by grammar. `mark` changes every grammar, so no cache has a grammar of a new mark."""

    def tools(*names: str) -> list[dict[str, Any]]:
        given = ({"name": name, "parameters": schema_of(20, f"{mark}_{name}")} for name in names)
        return [{"type": "function", "function": each} for each in given]

    def schema(value: dict[str, Any]) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": value}}}

    listed = {"type": "array", "items": schema_of(3, f"{mark}_item")}
    named = {"type": "function", "function": {"name": "one"}}
    return {
        "schema of 3 fields": schema(schema_of(3, mark)),
        "schema of 20 fields": schema(schema_of(20, mark)),
        "list of objects": schema(listed),
        "tool_choice required": {"tools": tools("one", "two"), "tool_choice": "required"},
        "a named tool": {"tools": tools("one"), "tool_choice": named},
    }


async def _requests(pair: Pair, size: Size) -> dict[str, dict[str, float]]:
    """Return, by grammar, how many seconds its first and a later request take more than a request without grammar."""
    settings = [f"model={pair.target}", f"speculative_draft_model_path={pair.draft}", "tool_call_parser=hermes"]
    found: dict[str, dict[str, list[float]]] = {}
    with ServerProcess(settings) as server:
        model = served_model(server.port)

        async def seconds(body: Mapping[str, Any]) -> float:
            messages = [{"role": "user", "content": "go"}]
            fixed = {"model": model, "messages": messages, "max_tokens": ANSWER, "temperature": 0}
            reply = await post(server.port, "/v1/chat/completions", fixed | dict(body))
            if reply.status != 200:
                raise ValueError(f"a request was answered {reply.status}: {reply.body[:300]!r} {reply.error}")
            return reply.seconds

        async def beyond(name: str, body: Mapping[str, Any]) -> None:
            same_prompt = ("tools", body.get("tools")), ("tool_choice", "auto")
            plain = dict(same_prompt) if "tools" in body else {}
            times = [await seconds(each) for each in (plain, body, plain, body, plain)]
            usual = median(times[::2])
            here = found.setdefault(name, {"first": [], "known": []})
            here["first"].append(times[1] - usual)
            here["known"].append(times[3] - usual)

        await seconds({"structured_outputs": {"choice": ["a", "b"]}})  # warm-up: the compiling process may still start
        await beyond("json_object", {"response_format": {"type": "json_object"}})
        for repeat in range(size.repeats):
            for name, body in _asking(f"turn{repeat}").items():
                await beyond(name, body)
    return {name: {what: median(times) for what, times in each.items()} for name, each in found.items()}


def _step(pair: Pair, worker: Worker, size: Size) -> float:
    """Return the time of a step in which all requests have grammars, over that of a step without grammars."""
    config = pair.config(DEFAULT, BATCH).model_copy(update={"speculative_forced_tokens": 0})
    engine = build_engine(config)
    prompts = random_prompts(engine.info().vocab_size, BATCH, 32)
    free = [params_of(size.new_tokens, seed=at) for at in range(BATCH)]
    listed = ({"type": "array", "items": schema_of(4, f"m{at}"), "minItems": ITEMS} for at in range(BATCH))
    texts = [worker.compile(Grammar("json_schema", json.dumps(each))) for each in listed]
    held = [replace(params, grammar=text, ignore_eos=False) for params, text in zip(free, texts, strict=True)]
    ratios = []
    for repeat in range(size.repeats + 1):
        pace = {}
        for name, params in [("free", free), ("held", held)][:: -1 if repeat % 2 else 1]:
            pace[name] = steady_steps(engine, prompts, params, BATCH).steps_per_second
        ratios.append(ratio(pace["free"], pace["held"]))
    return median(ratios[1:])
