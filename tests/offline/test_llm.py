"""The offline `LLM` gives the same answers as the REST API and `aerie generate`. An invalid argument is refused by its
name.
"""

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
from tests.parity.test_nonfinite import BAD_TOKEN, EMBEDDING, corrupted_copy
from tests.serving.api.scripted import Client
from tests.serving.api.test_engine import EngineService
from tests.support.tiny_checkpoints import target_folder

ROOT = Path(__file__).resolve().parents[2]
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
def rest_client() -> Iterator[Client]:
    """The REST API over the demo target without a draft."""
    service = EngineService(TARGET, model_path=TARGET)
    yield Client(make_app(service))
    service.grammars.close()
    assert service.engine.loop.stop()


@pytest.fixture(scope="module")
def speculative_llm() -> Iterator[LLM]:
    with LLM(TARGET, draft=DRAFT, max_running_requests=3, **SETTINGS, **TREE) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain_llm() -> Iterator[LLM]:
    with LLM(TARGET, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm_without_tokenizer() -> Iterator[LLM]:
    """An LLM without a tokenizer. The embedding of its token `BAD_TOKEN` is NaN."""
    with LLM(corrupted_copy(target_folder(), EMBEDDING), **SETTINGS) as llm:
        yield llm


def assert_same_answer(output: RequestOutput, answer: dict[str, Any]) -> None:
    """Assert that the offline output for one prompt equals the REST API's answer."""
    for offline_value, rest_value in zip(output.outputs, answer["choices"], strict=True):
        rest_text = rest_value["text"] if "text" in rest_value else rest_value["message"]["content"] or ""
        assert (offline_value.text, offline_value.token_ids) == (rest_text, rest_value["token_ids"])
        assert (offline_value.finish_reason, offline_value.stop_reason) == (
            rest_value["finish_reason"],
            rest_value["stop_reason"],
        )
        if offline_value.logprobs is not None:
            chosen_logprobs = [
                token_logprobs[token].logprob
                for token_logprobs, token in zip(offline_value.logprobs, offline_value.token_ids, strict=True)
            ]
            assert chosen_logprobs == pytest.approx(rest_value["logprobs"]["token_logprobs"], abs=1e-9)
            assert offline_value.cumulative_logprob == pytest.approx(sum(chosen_logprobs))
            for token_logprobs in offline_value.logprobs:
                assert sorted((each.rank for each in token_logprobs.values() if each.rank), key=int)[:2] == [1, 2]
    assert output.num_cached_tokens >= 0
    first = answer["choices"][0]
    if first.get("prompt_logprobs"):
        rest_value = [
            entry and {int(token): logprob_entry["logprob"] for token, logprob_entry in entry.items()}
            for entry in first["prompt_logprobs"]
        ]
        offline_logprobs = [
            entry and {token: logprob_entry.logprob for token, logprob_entry in entry.items()}
            for entry in output.prompt_logprobs or []
        ]
        assert offline_logprobs[0] is rest_value[0] is None
        for offline_value, token_logprobs in zip(offline_logprobs[1:], rest_value[1:], strict=True):
            assert offline_value == pytest.approx(token_logprobs, abs=1e-9)


PROMPTS_AND_PARAMS = [(PROMPTS[at // len(SAMPLINGS) + at % 2], SAMPLINGS[at % len(SAMPLINGS)]) for at in range(12)]


@pytest.fixture(scope="module")
def rest_answers(rest_client: Client) -> list[dict[str, Any]]:
    """The REST API's answers to `PROMPTS_AND_PARAMS`, each sent in its own request."""
    return [
        rest_client.complete(prompt=prompt, return_token_ids=True, **params).json()
        for prompt, params in PROMPTS_AND_PARAMS
    ]


@pytest.mark.parametrize("llm_fixture", [pytest.param("plain_llm", marks=pytest.mark.slow), "speculative_llm"])
def test_generate_outputs_equal_the_rest_api_answers(
    llm_fixture: str, rest_answers: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """The call has more sequences than the LLM submits to the engine at once. Each prompt has its own parameters."""
    llm: LLM = request.getfixturevalue(llm_fixture)
    assert llm_fixture == "plain_llm" or len(PROMPTS_AND_PARAMS) > MAX_SUBMITTED_PER_SLOT * 3
    prompts = [prompt for prompt, _ in PROMPTS_AND_PARAMS]
    outputs = llm.generate(prompts, [SamplingParams(**params) for _, params in PROMPTS_AND_PARAMS], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output, answer in zip(outputs, rest_answers, strict=True):
        assert_same_answer(output, answer)
    longest = max(outputs, key=lambda output: len(output.outputs[0].token_ids)).outputs[0]
    assert longest.accept_length > 1.2 if llm_fixture == "speculative_llm" else longest.accept_length == 1.0


def test_chat_outputs_equal_the_rest_api_with_tools_and_schemas(speculative_llm: LLM, rest_client: Client) -> None:
    messages = [{"role": "user", "content": "import os"}]
    weather = {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "w", "schema": weather["parameters"]}}
    tool_fields = {"tools": [{"type": "function", "function": weather}], "tool_choice": "required"}
    for extra_fields in ({}, tool_fields, {"response_format": response_format}):
        params = {"temperature": 1, "seed": 9, "max_tokens": 48}
        (output,) = speculative_llm.chat(messages, SamplingParams(**params), **extra_fields, use_tqdm=False)  # type: ignore[arg-type]
        answer = rest_client.chat(messages=messages, return_token_ids=True, **params, **extra_fields).json()
        assert_same_answer(output, answer)
        message, rest_message = dict(output.outputs[0].message or {}), answer["choices"][0]["message"]
        for each_message in (message, rest_message):
            for call in each_message.get("tool_calls", ()):
                del call["id"]  # random
        assert message == rest_message
    two_outputs = speculative_llm.chat(
        [messages, messages], {"max_tokens": 2, "temperature": 0, "logprobs": 1}, use_tqdm=False
    )
    assert (
        two_outputs[0].outputs[0].token_ids == two_outputs[1].outputs[0].token_ids
        and len(two_outputs[0].outputs[0].logprobs or ()) == 2
    )


def test_generate_output_equals_the_generate_command(speculative_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, sampling in ((["--temperature", "0"], {"temperature": 0}), (["--temperature", "1"], {"seed": 0})):
        command = ["generate", TARGET, PROMPTS[1], "--max-tokens", "16", *flags, "--dtype", "float64", "--json"]
        assert main(command) == 0
        command_result = json.loads(capsys.readouterr().out)
        (output,) = speculative_llm.generate(PROMPTS[1], SamplingParams(max_tokens=16, **sampling), use_tqdm=False)  # type: ignore[arg-type]
        assert (output.text, output.outputs[0].token_ids) == (command_result["text"], command_result["token_ids"])
        assert output.prompt_token_ids == command_result["prompt_token_ids"]


def test_outputs_follow_structured_outputs(speculative_llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    cases: list[tuple[StructuredOutputsParams | dict[str, Any], Callable[[str], object]]] = [
        (StructuredOutputsParams(json=schema), lambda text: json.loads(text)["n"] in (1, 2)),
        (StructuredOutputsParams(regex="[a-c]{3}"), lambda text: re.fullmatch("[a-c]{3}", text)),
        ({"choice": ("yes", "no")}, lambda text: text in ("yes", "no")),
        (StructuredOutputsParams(grammar='root ::= "so " [0-9]'), lambda text: re.fullmatch("so [0-9]", text)),
    ]
    params = [
        SamplingParams(max_tokens=64, seed=at, structured_outputs=constraint)
        for at, (constraint, _) in enumerate(cases)
    ]
    outputs = speculative_llm.generate(["x = "] * len(cases), params, use_tqdm=False)
    for (constraint, is_valid), output in zip(cases, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop" and is_valid(output.text), (constraint, output.text)


def test_llm_works_after_ctrl_c_and_inside_a_running_event_loop(
    plain_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first_outputs = plain_llm.generate(PROMPTS, params, use_tqdm=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    engine = plain_llm._engine
    assert engine is not None
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (os.kill(os.getpid(), signal.SIGINT), step())[1])
    with pytest.raises(KeyboardInterrupt):
        plain_llm.generate(PROMPTS, params, use_tqdm=False)
    monkeypatch.undo()
    assert not engine.has_work
    engine.check_pages()

    async def notebook() -> list[RequestOutput]:
        return plain_llm.generate(PROMPTS, params, use_tqdm=False)

    second_outputs = asyncio.run(notebook())
    assert [output.outputs for output in second_outputs] == [output.outputs for output in first_outputs]


def test_failed_sequence_does_not_affect_others(llm_without_tokenizer: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"temperature": 0, "ignore_eos": True, "logit_bias": {BAD_TOKEN: -100}}
    outputs = llm_without_tokenizer.generate([{"prompt_token_ids": [5, 6]}, (BAD_TOKEN,)], params)
    good, bad = (output.outputs[0] for output in outputs)
    assert good.finish_reason == "length" and len(good.token_ids) == 16
    assert bad.finish_reason == "error" and "not finite" in (bad.error or "") and bad.token_ids == []
    assert "2/2" in capsys.readouterr().err, "the progress bar"


def test_invalid_arguments_are_refused_by_name(plain_llm: LLM, llm_without_tokenizer: LLM) -> None:
    long_text, messages = "x = 1\n" * 4000, [{"role": "user", "content": "a"}, {"role": "x", "content": "b"}]
    bad_constraint: dict[str, Any] = {"structured_outputs": {"choice": 1}}
    misspelt: dict[str, Any] = {"context_lenght": 9}
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"prompts\[1\]: prompt is too long", lambda: plain_llm.generate(["a", long_text])),
        (ValueError, r"^prompts: prompt is too long", lambda: plain_llm.generate(long_text)),
        (ValueError, r"prompts\[1\]: must not be empty", lambda: plain_llm.generate(["a", ""])),
        (ValueError, r"prompts\[0\]: max_tokens: .*at most", lambda: plain_llm.generate(["a"], {"max_tokens": 9999})),
        (ValueError, r"prompts\[0\] must have one of prompt", lambda: plain_llm.generate([{"promt": "a"}])),  # type: ignore[list-item]
        (ValueError, r"prompts\[0\]: item 0: must hold token ids", lambda: plain_llm.generate([[[1], [2]]])),  # type: ignore[list-item]
        (ValueError, "sampling_params must be SamplingParams, .* got 'x'", lambda: plain_llm.generate("a", "x")),  # type: ignore[arg-type]
        (ValueError, "2 entries for 1 of prompts", lambda: plain_llm.generate("a", [SamplingParams()] * 2)),
        (ValueError, "'max_new_tokens'; use max_tokens", lambda: plain_llm.generate("a", {"max_new_tokens": 3})),
        (ValueError, "temperature: must be", lambda: SamplingParams(temperature=-1)),
        (ValueError, "structured_outputs.choice: must be a list", lambda: SamplingParams(**bad_constraint)),
        (ValueError, r"messages\[0\].1.role: must be", lambda: plain_llm.chat([messages])),
        (ValueError, r"prompts\[0\]: a text needs a tokenizer", lambda: llm_without_tokenizer.generate(["a"])),
        (ValueError, "no chat template", lambda: llm_without_tokenizer.chat([{"role": "user", "content": "a"}])),
        (ConfigError, "'context_lenght'; did you mean 'context_length'", lambda: LLM(TARGET, **misspelt)),
        (ConfigError, "tp_size 2 needs 2 processes", lambda: LLM(TARGET, tensor_parallel_size=2)),
        (ConfigError, "max_queue_wait_s is a setting of a server", lambda: LLM(TARGET, max_queue_wait_s=1)),
        (ConfigError, "sampling_defaults must be", lambda: LLM(TARGET, sampling_defaults="vllm")),  # type: ignore[arg-type]
    ]  # fmt: skip
    for error_class, message, make_call in cases:
        with pytest.raises(error_class, match=message):
            make_call()
    assert plain_llm.generate([], use_tqdm=False) == []
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
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    stub = ast.parse((ROOT / "cluster/__init__.pyi").read_text(encoding="utf-8"))
    typed = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(cluster.__all__)
