"""The client of record against a real server: what it parses, what it raises."""

from pathlib import Path

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from cluster.api.core.tokenizer import ChatTokenizer
from tests.api.listening import assert_closing_aborts
from tests.api.scripted import EOS, MODEL, ScriptedService, save_tokenizer

SAID = "once upon a time 😀 there was an aerie"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(openai: OpenAI, service: ScriptedService) -> OpenAI:
    service.engine.script = SAID.encode()
    return openai


def test_openai_client_lists_and_retrieves_models(api: OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "aerie"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_openai_client_reads_chat_and_completion_answers(api: OpenAI) -> None:
    chat = api.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2, seed=1)
    [choice] = chat.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert [entry.token for entry in choice.logprobs.content][:4] == ["o", "n", "c", "e"]
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert chat.usage.completion_tokens == len(SAID.encode()) + 1
    assert chat.usage.prompt_tokens_details.cached_tokens == 2
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens > 0
    text = api.completions.create(model=MODEL, prompt=["a", "b"], n=2, stop=" time", max_tokens=100, logprobs=1)
    assert [choice.text for choice in text.choices] == ["once upon a"] * 4
    assert text.choices[3].logprobs.tokens[0] == "o"


def test_openai_client_reads_chat_and_completion_streams(api: OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=HI, stream=True, n=2, stream_options={"include_usage": True}, stop=["aerie"]
        )
    )
    said = ["", ""]
    for chunk in chunks[:-1]:
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == [SAID.removesuffix("aerie")] * 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 2 * len(SAID.encode())
    text = api.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=8)
    assert "".join(chunk.choices[0].text for chunk in text) == SAID[:8]
    with api.chat.completions.stream(model=MODEL, messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == SAID


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OSLO = '{"city": "Oslo"}'


@pytest.fixture
def calling(api: OpenAI, service: ScriptedService, tmp_path: Path) -> OpenAI:
    """A model whose template knows tools, and that calls one."""
    template = "{{ messages[-1].content }}{% if tools %}<tool_call>{% endif %}"
    service.tokenizer = ChatTokenizer.load(str(save_tokenizer(tmp_path, template)))
    service.engine.script = f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'.encode()
    return api


def test_openai_client_reads_tool_calls_and_sends_results_back(calling: OpenAI) -> None:
    answer = calling.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", OSLO)
    again = [*HI, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert calling.chat.completions.create(model=MODEL, messages=again, tools=[WEATHER], max_tokens=1).choices


def test_openai_client_reads_streamed_tool_calls(calling: OpenAI) -> None:
    chunks = calling.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER], stream=True)
    found = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in found if call.id] == ["weather"]
    assert "".join(call.function.arguments for call in found) == OSLO and {call.index for call in found} == {0}
    with calling.chat.completions.stream(model=MODEL, messages=HI, tools=[WEATHER]) as stream:
        done = stream.get_final_completion().choices[0]
    assert (done.finish_reason, done.message.content) == ("tool_calls", "I look.")
    assert done.message.tool_calls[0].function.arguments == OSLO


class Person(BaseModel):
    name: str
    age: int


def test_openai_client_parses_structured_answers_and_tool_arguments(calling: OpenAI, service: ScriptedService) -> None:
    class weather(BaseModel):
        city: str

    tools = [openai.pydantic_function_tool(weather)]
    called = calling.chat.completions.parse(model=MODEL, messages=HI, tools=tools).choices[0].message
    assert called.tool_calls[0].function.parsed_arguments == weather(city="Oslo")
    service.engine.script = b'{"name": "Ann", "age": 3}'
    parsed = calling.chat.completions.parse(model=MODEL, messages=HI, response_format=Person).choices[0].message
    assert parsed.parsed == Person(name="Ann", age=3)
    assert service.engine.requests[-1].params.grammar is not None


def test_openai_client_extra_body_fields_reach_the_engine(api: OpenAI, service: ScriptedService) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [EOS]}
    api.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, extra_body=extra)
    params = service.engine.requests[0].params
    assert (params.top_k, params.min_p, params.ignore_eos, params.stop_token_ids) == (5, 0.1, True, (EOS,))


def test_openai_client_raises_the_matching_error_types(api: OpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError, match="context length"):
        api.completions.create(model=MODEL, prompt="x" * 600)
    service.engine.queue_is_full = True
    with pytest.raises(openai.InternalServerError) as full:
        api.completions.create(model=MODEL, prompt="x")
    assert (full.value.status_code, full.value.response.headers["retry-after"]) == (503, "1")
    service.engine.queue_is_full = False
    service.engine.fail_at = 5
    stream = api.completions.create(model=MODEL, prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="failed to answer"):
        list(stream)
    service.engine.fail_at = None
    assert api.completions.create(model=MODEL, prompt="x", max_tokens=4).choices[0].text == "once"


def test_closing_an_openai_stream_aborts_its_request(api: OpenAI, service: ScriptedService) -> None:
    service.engine.step_s = 0.01
    stream = api.completions.create(
        model=MODEL, prompt="x", stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    assert_closing_aborts(stream, service)


def test_openai_client_reads_responses_and_counts_input_tokens(api: OpenAI) -> None:
    response = api.responses.create(model=MODEL, input="hi", instructions="be brief", metadata={"a": "b"})
    assert (response.output_text, response.status, response.metadata) == (SAID, "completed", {"a": "b"})
    assert response.usage.output_tokens == len(SAID.encode()) + 1
    assert response.usage.input_tokens_details.cached_tokens == 2
    turns = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in response.output), *HI]
    counted = api.responses.input_tokens.count(model=MODEL, input=turns)
    assert counted.input_tokens == api.responses.create(model=MODEL, input=turns).usage.input_tokens
    cut = api.responses.create(model=MODEL, input=HI, max_output_tokens=4)
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("once", "incomplete", "max_output_tokens")
    with pytest.raises(openai.NotFoundError, match="stores none"):
        api.responses.retrieve(response.id)


def test_openai_client_reads_streamed_responses(api: OpenAI) -> None:
    with api.responses.stream(model=MODEL, input="hi") as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (said, final.output_text, final.status) == (SAID, SAID, "completed")
    raw = list(api.responses.create(model=MODEL, input="hi", stream=True, max_output_tokens=4))
    assert [event.type for event in raw][:2] == ["response.created", "response.in_progress"]
    assert raw[-1].type == "response.incomplete" and raw[-1].response.output_text == "once"
    assert [event.sequence_number for event in raw] == [*range(len(raw))]


class Named(BaseModel):
    """What an answer has to be."""

    name: str


def test_openai_client_parses_structured_responses(api: OpenAI, service: ScriptedService) -> None:
    service.engine.script = b'{"name": "Ann"}'
    assert api.responses.parse(model=MODEL, input="who?", text_format=Named).output_parsed == Named(name="Ann")
    assert service.engine.requests[0].params.grammar is not None
    with api.responses.stream(model=MODEL, input="who?", text_format=Named) as stream:
        assert stream.get_final_response().output_parsed == Named(name="Ann")


def test_openai_client_reads_errors_of_the_responses_api(api: OpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
    assert (bad.value.param, bad.value.code) == ("input.0.type", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
        api.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    service.engine.fail_at = 5
    *_, error, failed = api.responses.create(model=MODEL, input="hi", stream=True)
    assert (error.type, error.code) == ("error", "internal_error")
    assert (failed.type, failed.response.error.code) == ("response.failed", "server_error")
