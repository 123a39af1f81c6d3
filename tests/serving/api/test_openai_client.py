"""OpenAI's official client against a real server: what it parses, which errors it raises."""

from pathlib import Path

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from cluster.api.core.tokenizer import ChatTokenizer
from tests.serving.api.listening import assert_closing_aborts
from tests.serving.api.scripted import EOS, MODEL, ScriptedService, save_tokenizer

OUTPUT_TEXT = "once upon a time 😀 there was an aerie"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(openai: OpenAI, service: ScriptedService) -> OpenAI:
    service.engine.script = OUTPUT_TEXT.encode()
    return openai


def test_openai_client_lists_and_retrieves_models(api: OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "aerie"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_openai_client_reads_chat_and_completion_answers(api: OpenAI) -> None:
    chat = api.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2, seed=1)
    [choice] = chat.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", OUTPUT_TEXT, "stop")
    assert [entry.token for entry in choice.logprobs.content][:4] == ["o", "n", "c", "e"]
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert chat.usage.completion_tokens == len(OUTPUT_TEXT.encode()) + 1
    assert chat.usage.prompt_tokens_details.cached_tokens == 2
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens > 0
    completion = api.completions.create(model=MODEL, prompt=["a", "b"], n=2, stop=" time", max_tokens=100, logprobs=1)
    assert [choice.text for choice in completion.choices] == ["once upon a"] * 4
    assert completion.choices[3].logprobs.tokens[0] == "o"


def test_openai_client_reads_chat_and_completion_streams(api: OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=HI, stream=True, n=2, stream_options={"include_usage": True}, stop=["aerie"]
        )
    )
    chat_texts = ["", ""]
    for chunk in chunks[:-1]:
        chat_texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert chat_texts == [OUTPUT_TEXT.removesuffix("aerie")] * 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 2 * len(OUTPUT_TEXT.encode())
    completion_chunks = api.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=8)
    assert "".join(chunk.choices[0].text for chunk in completion_chunks) == OUTPUT_TEXT[:8]
    with api.chat.completions.stream(model=MODEL, messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == OUTPUT_TEXT


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OSLO = '{"city": "Oslo"}'


@pytest.fixture
def tool_client(api: OpenAI, service: ScriptedService, tmp_path: Path) -> OpenAI:
    """The client of a server whose chat template knows tools and whose model calls one."""
    template = "{{ messages[-1].content }}{% if tools %}<tool_call>{% endif %}"
    service.tokenizer = ChatTokenizer.load(str(save_tokenizer(tmp_path, template)))
    service.engine.script = f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'.encode()
    return api


def test_openai_client_reads_tool_calls_and_sends_results_back(tool_client: OpenAI) -> None:
    answer = tool_client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER])
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", OSLO)
    follow_up = [*HI, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert tool_client.chat.completions.create(model=MODEL, messages=follow_up, tools=[WEATHER], max_tokens=1).choices


def test_openai_client_reads_streamed_tool_calls(tool_client: OpenAI) -> None:
    chunks = tool_client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER], stream=True)
    call_deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in call_deltas if call.id] == ["weather"]
    assert "".join(call.function.arguments for call in call_deltas) == OSLO and {
        call.index for call in call_deltas
    } == {0}
    with tool_client.chat.completions.stream(model=MODEL, messages=HI, tools=[WEATHER]) as stream:
        choice = stream.get_final_completion().choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls[0].function.arguments == OSLO


class Person(BaseModel):
    name: str
    age: int


def test_openai_client_parses_structured_answers_and_tool_arguments(
    tool_client: OpenAI, service: ScriptedService
) -> None:
    class weather(BaseModel):
        city: str

    tools = [openai.pydantic_function_tool(weather)]
    tool_message = tool_client.chat.completions.parse(model=MODEL, messages=HI, tools=tools).choices[0].message
    assert tool_message.tool_calls[0].function.parsed_arguments == weather(city="Oslo")
    service.engine.script = b'{"name": "Ann", "age": 3}'
    text_message = (
        tool_client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person).choices[0].message
    )
    assert text_message.parsed == Person(name="Ann", age=3)
    assert service.engine.requests[-1].params.grammar is not None


def test_openai_client_extra_body_fields_reach_the_engine(api: OpenAI, service: ScriptedService) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [EOS]}
    api.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, extra_body=extra)
    params = service.engine.requests[0].params
    assert (params.top_k, params.min_p, params.ignore_eos, params.stop_token_ids) == (5, 0.1, True, (EOS,))


def test_openai_client_raises_the_matching_error_types(api: OpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.BadRequestError) as error_info:
        api.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert (error_info.value.param, error_info.value.code, error_info.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError, match="context length"):
        api.completions.create(model=MODEL, prompt="x" * 600)
    service.engine.queue_is_full = True
    with pytest.raises(openai.InternalServerError) as overloaded:
        api.completions.create(model=MODEL, prompt="x")
    assert (overloaded.value.status_code, overloaded.value.response.headers["retry-after"]) == (503, "1")
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
    assert (response.output_text, response.status, response.metadata) == (OUTPUT_TEXT, "completed", {"a": "b"})
    assert response.usage.output_tokens == len(OUTPUT_TEXT.encode()) + 1
    assert response.usage.input_tokens_details.cached_tokens == 2
    turns = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in response.output), *HI]
    token_count = api.responses.input_tokens.count(model=MODEL, input=turns)
    assert token_count.input_tokens == api.responses.create(model=MODEL, input=turns).usage.input_tokens
    truncated = api.responses.create(model=MODEL, input=HI, max_output_tokens=4)
    assert (truncated.output_text, truncated.status, truncated.incomplete_details.reason) == (
        "once",
        "incomplete",
        "max_output_tokens",
    )
    with pytest.raises(openai.NotFoundError, match="stores none"):
        api.responses.retrieve(response.id)


def test_openai_client_reads_streamed_responses(api: OpenAI) -> None:
    with api.responses.stream(model=MODEL, input="hi") as stream:
        streamed_text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (streamed_text, final.output_text, final.status) == (OUTPUT_TEXT, OUTPUT_TEXT, "completed")
    raw_events = list(api.responses.create(model=MODEL, input="hi", stream=True, max_output_tokens=4))
    assert [event.type for event in raw_events][:2] == ["response.created", "response.in_progress"]
    assert raw_events[-1].type == "response.incomplete" and raw_events[-1].response.output_text == "once"
    assert [event.sequence_number for event in raw_events] == [*range(len(raw_events))]


class Named(BaseModel):
    """The schema of the structured answer."""

    name: str


def test_openai_client_parses_structured_responses(api: OpenAI, service: ScriptedService) -> None:
    service.engine.script = b'{"name": "Ann"}'
    assert api.responses.parse(model=MODEL, input="who?", text_format=Named).output_parsed == Named(name="Ann")
    assert service.engine.requests[0].params.grammar is not None
    with api.responses.stream(model=MODEL, input="who?", text_format=Named) as stream:
        assert stream.get_final_response().output_parsed == Named(name="Ann")


def test_openai_client_reads_errors_of_the_responses_api(api: OpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.BadRequestError) as error_info:
        api.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
    assert (error_info.value.param, error_info.value.code) == ("input.0.type", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
        api.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    service.engine.fail_at = 5
    *_, error, failed = api.responses.create(model=MODEL, input="hi", stream=True)
    assert (error.type, error.code) == ("error", "internal_error")
    assert (failed.type, failed.response.error.code) == ("response.failed", "server_error")
