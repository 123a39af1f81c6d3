"""The offline door: its answers are the REST API's and `aerie generate`'s; what cannot be served is refused by name."""

import ast
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cluster
from cluster import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from cluster.api.http.routes import make_app
from cluster.cli import main
from cluster.config import ConfigError
from cluster.offline.llm import MAX_SUBMITTED_PER_SLOT
from tests.api.scripted import Client
from tests.api.test_engine import EngineService
from tests.parity.test_nonfinite import BAD, EMBEDDING, spoiled
from tests.tiny import target_folder

ROOT = Path(__file__).resolve().parents[3]
TARGET, DRAFT = str(ROOT / "models/demo/target"), str(ROOT / "models/demo/draft")
SETTINGS: dict[str, Any] = {"dtype": "float64", "max_total_tokens": 4096, "page_size": 4, "capture": "off"}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 12}
PROMPTS = ["import os\n", "def read(self, size=-1):\n", "class Queue:\n    def __init__(self, maxsize=0):\n" * 3, "x"]
SAMPLINGS = [
    {"temperature": 0, "max_tokens": 10},
    {"temperature": 1, "seed": 3, "max_tokens": 8, "logprobs": 2, "n": 2},
    {"temperature": 1, "seed": -4, "top_p": 0.9, "presence_penalty": 1.5, "stop": ["self", "\n\n"], "max_tokens": 12},
    {"temperature": 1, "seed": 5, "max_tokens": 4, "prompt_logprobs": 1, "include_stop_str_in_output": True},
]


@pytest.fixture(scope="module")
def rest() -> Iterator[Client]:
    """The REST API over the demo target without a draft."""
    service = EngineService(TARGET, model_path=TARGET)
    yield Client(make_app(service))
    service.grammars.close()
    assert service.engine.loop.stop()


@pytest.fixture(scope="module")
def speculating() -> Iterator[LLM]:
    with LLM(TARGET, draft=DRAFT, max_running_requests=3, **SETTINGS, **TREE) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(TARGET, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def wordless() -> Iterator[LLM]:
    """A model without a tokenizer, one of whose tokens makes its numbers NaN."""
    with LLM(spoiled(target_folder(), EMBEDDING), **SETTINGS) as llm:
        yield llm


def check(output: RequestOutput, answer: dict[str, Any]) -> None:
    """What the offline door gave for one prompt is what the REST API answered."""
    for mine, theirs in zip(output.outputs, answer["choices"], strict=True):
        said = theirs["text"] if "text" in theirs else theirs["message"]["content"] or ""
        assert (mine.text, mine.token_ids) == (said, theirs["token_ids"])
        assert (mine.finish_reason, mine.stop_reason) == (theirs["finish_reason"], theirs["stop_reason"])
        if mine.logprobs is not None:
            own = [found[token].logprob for found, token in zip(mine.logprobs, mine.token_ids, strict=True)]
            assert own == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-9)
            assert mine.cumulative_logprob == pytest.approx(sum(own))
            for found in mine.logprobs:
                assert sorted((each.rank for each in found.values() if each.rank), key=int)[:2] == [1, 2]
    assert output.num_cached_tokens >= 0
    first = answer["choices"][0]
    if first.get("prompt_logprobs"):
        theirs = [
            entry and {int(token): one["logprob"] for token, one in entry.items()} for entry in first["prompt_logprobs"]
        ]
        ours = [
            entry and {token: one.logprob for token, one in entry.items()} for entry in output.prompt_logprobs or []
        ]
        assert ours[0] is theirs[0] is None
        for mine, found in zip(ours[1:], theirs[1:], strict=True):
            assert mine == pytest.approx(found, abs=1e-9)


ASKED = [(PROMPTS[at // len(SAMPLINGS) + at % 2], SAMPLINGS[at % len(SAMPLINGS)]) for at in range(12)]


@pytest.fixture(scope="module")
def expected(rest: Client) -> list[dict[str, Any]]:
    """What the REST API answers to each of `ASKED` alone."""
    return [rest.complete(prompt=prompt, return_token_ids=True, **given).json() for prompt, given in ASKED]


@pytest.mark.parametrize("kind", ["plain", "speculating"])
def test_generate_outputs_equal_the_rest_api_answers(
    kind: str, expected: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """More sequences than the engine is given at once; each prompt has parameters of its own."""
    llm: LLM = request.getfixturevalue(kind)
    assert kind == "plain" or len(ASKED) > MAX_SUBMITTED_PER_SLOT * 3
    prompts = [prompt for prompt, _ in ASKED]
    outputs = llm.generate(prompts, [SamplingParams(**given) for _, given in ASKED], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output, answer in zip(outputs, expected, strict=True):
        check(output, answer)
    longest = max(outputs, key=lambda output: len(output.outputs[0].token_ids)).outputs[0]
    assert longest.accept_length > 1.2 if kind == "speculating" else longest.accept_length == 1.0


def test_chat_outputs_equal_the_rest_api_with_tools_and_schemas(speculating: LLM, rest: Client) -> None:
    talk = [{"role": "user", "content": "import os"}]
    weather = {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    }
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": weather["parameters"]}}
    calling = {"tools": [{"type": "function", "function": weather}], "tool_choice": "required"}
    for beside in ({}, calling, {"response_format": form}):
        given = {"temperature": 1, "seed": 9, "max_tokens": 48}
        (output,) = speculating.chat(talk, SamplingParams(**given), **beside, use_tqdm=False)  # type: ignore[arg-type]
        answer = rest.chat(messages=talk, return_token_ids=True, **given, **beside).json()
        check(output, answer)
        message, theirs = dict(output.outputs[0].message or {}), answer["choices"][0]["message"]
        for said in (message, theirs):
            for call in said.get("tool_calls", ()):
                del call["id"]  # random
        assert message == theirs
    both = speculating.chat([talk, talk], {"max_tokens": 2, "temperature": 0, "logprobs": 1}, use_tqdm=False)
    assert both[0].outputs[0].token_ids == both[1].outputs[0].token_ids and len(both[0].outputs[0].logprobs or ()) == 2


def test_generate_output_equals_the_generate_command(speculating: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sampling in ((["--temperature", "0"], {"temperature": 0}), (["--temperature", "1"], {"seed": 0})):
        command = ["generate", TARGET, PROMPTS[1], "--max-tokens", "16", *words, "--dtype", "float64", "--json"]
        assert main(command) == 0
        said = json.loads(capsys.readouterr().out)
        (output,) = speculating.generate(PROMPTS[1], SamplingParams(max_tokens=16, **sampling), use_tqdm=False)  # type: ignore[arg-type]
        assert (output.text, output.outputs[0].token_ids) == (said["text"], said["token_ids"])
        assert output.prompt_token_ids == said["prompt_token_ids"]


def test_outputs_follow_structured_outputs(speculating: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    asked: list[tuple[StructuredOutputsParams | dict[str, Any], Callable[[str], object]]] = [
        (StructuredOutputsParams(json=schema), lambda text: json.loads(text)["n"] in (1, 2)),
        (StructuredOutputsParams(regex="[a-c]{3}"), lambda text: re.fullmatch("[a-c]{3}", text)),
        ({"choice": ("yes", "no")}, lambda text: text in ("yes", "no")),
        (StructuredOutputsParams(grammar='root ::= "so " [0-9]'), lambda text: re.fullmatch("so [0-9]", text)),
    ]
    params = [SamplingParams(max_tokens=64, seed=at, structured_outputs=form) for at, (form, _) in enumerate(asked)]
    outputs = speculating.generate(["x = "] * len(asked), params, use_tqdm=False)
    for (form, holds), output in zip(asked, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop" and holds(output.text), (form, output.text)


def test_llm_works_after_ctrl_c_and_inside_a_running_event_loop(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = plain.generate(PROMPTS, few, use_tqdm=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    engine = plain._engine
    assert engine is not None
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (os.kill(os.getpid(), signal.SIGINT), step())[1])
    with pytest.raises(KeyboardInterrupt):
        plain.generate(PROMPTS, few, use_tqdm=False)
    monkeypatch.undo()
    assert not engine.has_work
    engine.check_pages()

    async def notebook() -> list[RequestOutput]:
        return plain.generate(PROMPTS, few, use_tqdm=False)

    again = asyncio.run(notebook())
    assert [output.outputs for output in again] == [output.outputs for output in before]


def test_failed_sequence_does_not_affect_others(wordless: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"temperature": 0, "ignore_eos": True, "logit_bias": {BAD: -100}}
    outputs = wordless.generate([{"prompt_token_ids": [5, 6]}, (BAD,)], params)
    good, bad = (output.outputs[0] for output in outputs)
    assert good.finish_reason == "length" and len(good.token_ids) == 16
    assert bad.finish_reason == "error" and "not finite" in (bad.error or "") and bad.token_ids == []
    assert "2/2" in capsys.readouterr().err, "the progress bar"


def test_invalid_arguments_are_refused_by_name(plain: LLM, wordless: LLM) -> None:
    long, talk = "x = 1\n" * 4000, [{"role": "user", "content": "a"}, {"role": "x", "content": "b"}]
    text: dict[str, Any] = {"structured_outputs": {"choice": 1}}
    misspelt: dict[str, Any] = {"context_lenght": 9}
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"prompts\[1\]: prompt is too long", lambda: plain.generate(["a", long])),
        (ValueError, r"^prompts: prompt is too long", lambda: plain.generate(long)),
        (ValueError, r"prompts\[1\]: must not be empty", lambda: plain.generate(["a", ""])),
        (ValueError, r"prompts\[0\]: max_tokens: .*at most", lambda: plain.generate(["a"], {"max_tokens": 9999})),
        (ValueError, r"prompts\[0\] must have one of prompt", lambda: plain.generate([{"promt": "a"}])),  # type: ignore[list-item]
        (ValueError, r"prompts\[0\]: item 0: must hold token ids", lambda: plain.generate([[[1], [2]]])),  # type: ignore[list-item]
        (ValueError, "sampling_params must be SamplingParams, .* got 'x'", lambda: plain.generate("a", "x")),  # type: ignore[arg-type]
        (ValueError, "2 entries for 1 of prompts", lambda: plain.generate("a", [SamplingParams()] * 2)),
        (ValueError, "'max_new_tokens'; use max_tokens", lambda: plain.generate("a", {"max_new_tokens": 3})),
        (ValueError, "temperature: must be", lambda: SamplingParams(temperature=-1)),
        (ValueError, "structured_outputs.choice: must be a list", lambda: SamplingParams(**text)),
        (ValueError, r"messages\[0\].1.role: must be", lambda: plain.chat([talk])),
        (ValueError, r"prompts\[0\]: a text needs a tokenizer", lambda: wordless.generate(["a"])),
        (ValueError, "no chat template", lambda: wordless.chat([{"role": "user", "content": "a"}])),
        (ConfigError, "'context_lenght'; did you mean 'context_length'", lambda: LLM(TARGET, **misspelt)),
        (ConfigError, "tp_size 2 needs 2 processes", lambda: LLM(TARGET, tensor_parallel_size=2)),
        (ConfigError, "max_queue_wait_s is a setting of a server", lambda: LLM(TARGET, max_queue_wait_s=1)),
        (ConfigError, "sampling_defaults must be", lambda: LLM(TARGET, sampling_defaults="vllm")),  # type: ignore[arg-type]
    ]  # fmt: skip
    for kind, said, call in refused:
        with pytest.raises(kind, match=said):
            call()
    assert plain.generate([], use_tqdm=False) == []
    with LLM(target_folder(), **SETTINGS) as closed:
        assert closed.info().dtype == "float64"
    closed.close()
    with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
        closed.generate([1])


def test_package_imports_llm_lazily_and_without_ray() -> None:
    code = (
        "import sys, cluster; assert 'torch' not in sys.modules; from cluster import LLM, SamplingParams; "
        "found = sorted({'ray', 'xgrammar'} & set(sys.modules)); sys.exit(f'imported {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    stub = ast.parse((ROOT / "cluster/__init__.pyi").read_text(encoding="utf-8"))
    typed = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(cluster.__all__)
