"""Anthropic's official client against a real server: what it parses, which errors it raises, what it retries."""

import threading

import anthropic
import pytest
from anthropic import Anthropic
from pydantic import BaseModel

from tests.serving.api.listening import assert_closing_aborts
from tests.serving.api.scripted import MODEL, ScriptedService

OUTPUT_TEXT = "once upon a time 😀 there was an aerie"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def script(service: ScriptedService) -> None:
    service.engine.script = OUTPUT_TEXT.encode()


@pytest.fixture
def api(anthropic: Anthropic) -> Anthropic:
    return anthropic


def test_anthropic_client_reads_messages_and_counts_tokens(api: Anthropic) -> None:
    message = api.messages.create(model=MODEL, max_tokens=100, messages=HI, system="be brief")
    [block] = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", OUTPUT_TEXT, "end_turn")
    assert message._request_id == message.id
    assert message.usage.output_tokens == len(OUTPUT_TEXT.encode()) + 1
    assert message.usage.cache_read_input_tokens == 2
    token_count = api.messages.count_tokens(model=MODEL, messages=HI, system="be brief")
    assert token_count.input_tokens == message.usage.input_tokens + 2
    truncated = api.messages.create(model=MODEL, max_tokens=4, messages=HI)
    assert (truncated.content[0].text, truncated.stop_reason) == ("once", "max_tokens")
    stopped_message = api.messages.create(model=MODEL, max_tokens=100, messages=HI, stop_sequences=[" time"])
    assert (stopped_message.content[0].text, stopped_message.stop_reason, stopped_message.stop_sequence) == (
        "once upon a", "stop_sequence", " time",
    )  # fmt: skip


def test_anthropic_client_reads_streams(api: Anthropic) -> None:
    with api.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == OUTPUT_TEXT
        message = stream.get_final_message()
    assert (message.content[0].text, message.stop_reason) == (OUTPUT_TEXT, "end_turn")
    assert message.usage.output_tokens == len(OUTPUT_TEXT.encode()) + 1
    raw_events = list(api.messages.create(model=MODEL, max_tokens=4, messages=HI, stream=True))
    assert [event.type for event in raw_events][:2] == ["message_start", "content_block_start"]
    assert [event.type for event in raw_events][-2:] == ["message_delta", "message_stop"]


class Person(BaseModel):
    """The schema of the structured answer."""

    name: str


def test_anthropic_client_parses_structured_answers(api: Anthropic, service: ScriptedService) -> None:
    service.engine.script = b'{"name": "Ann"}'
    parsed = api.messages.parse(model=MODEL, max_tokens=100, messages=HI, output_format=Person)
    assert parsed.parsed_output == Person(name="Ann")
    assert service.engine.requests[0].params.grammar is not None


def test_anthropic_client_extra_body_fields_reach_the_engine(api: Anthropic, service: ScriptedService) -> None:
    extra = {"seed": 7, "top_k": 5, "temperature": 0.5}
    api.messages.create(model=MODEL, max_tokens=4, messages=HI, extra_body=extra, extra_headers={"anthropic-beta": "x"})
    params = service.engine.requests[0].params
    assert (params.seed, params.top_k, params.temperature) == (7, 5, 0.5)


def test_anthropic_client_raises_the_matching_error_types(api: Anthropic, service: ScriptedService) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature: must be"):
        api.messages.create(model=MODEL, max_tokens=4, messages=HI, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError) as not_found:
        api.messages.create(model="other", max_tokens=4, messages=HI)
    assert not_found.value.body["error"]["type"] == "not_found_error"
    service.engine.queue_is_full = True
    with pytest.raises(anthropic.InternalServerError) as overloaded:
        api.messages.create(model=MODEL, max_tokens=4, messages=HI)
    assert (overloaded.value.status_code, overloaded.value.response.headers["retry-after"]) == (503, "1")
    service.engine.queue_is_full = False
    service.engine.fail_at = 5
    with pytest.raises(anthropic.APIStatusError, match="failed to answer"):
        list(api.messages.create(model=MODEL, max_tokens=40, messages=HI, stream=True))
    service.engine.fail_at = None
    assert api.messages.create(model=MODEL, max_tokens=4, messages=HI).content[0].text == "once"


def test_anthropic_client_retries_after_a_503(url: str, service: ScriptedService) -> None:
    """Anthropic's servers answer overload with 529. Its client retries after 503 too, so this server sends 503."""
    service.engine.queue_is_full = True
    finished = threading.Event()

    def free_the_queue() -> None:
        while not service.engine.refusals and not finished.wait(0.01):
            pass
        service.engine.queue_is_full = False

    queue_thread = threading.Thread(target=free_the_queue)
    queue_thread.start()
    try:
        with Anthropic(base_url=url, api_key="none", max_retries=2) as client:
            assert client.messages.create(model=MODEL, max_tokens=4, messages=HI).content[0].text == "once"
    finally:
        finished.set()
        queue_thread.join(10)
    assert len(service.engine.requests) == 2


def test_closing_an_anthropic_stream_aborts_its_request(api: Anthropic, service: ScriptedService) -> None:
    service.engine.step_s = 0.01
    stream = api.messages.create(model=MODEL, max_tokens=400, messages=HI, stream=True, extra_body={"ignore_eos": True})
    assert_closing_aborts(stream, service)
