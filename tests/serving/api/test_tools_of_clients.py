"""Tool types other than functions that clients declare: custom, namespace, tool_search, and ignored hosted tools."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai import OpenAI
from openai.types.responses.tool_param import ToolParam

from cluster.api.core.fields import WARNING_HEADER
from cluster.api.openai.responses.request import ResponseRequest
from tests.serving.api.scripted import MODEL, Client, ScriptedService
from tests.serving.api.test_tool_calls_and_reasoning import folder as folder
from tests.serving.api.test_tool_calls_and_reasoning import prompt_of

HI: list[Any] = [{"role": "user", "content": "hi"}]
PATCH = '*** Begin "Patch"\n+é\n'
LIST = {"type": "function", "name": "list", "description": "of a folder", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "edit", "description": "d"}
NAMESPACE = {"type": "namespace", "name": "files", "description": "of files", "tools": [LIST, CUSTOM]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}
RUN = {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [RUN, CUSTOM, NAMESPACE, SEARCH, {"type": "web_search"}]
CALLS = (
    ("edit", {"input": PATCH}),
    ("files.list", {"path": "/"}),
    ("files.edit", {"input": "x"}),
    ("tool_search", {"query": "q"}),
    ("run", {}),
)
OUTPUT_TEXT = "".join(
    f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in CALLS
)


@pytest.fixture
def service(folder: Path) -> ScriptedService:
    scripted_service = ScriptedService(folder)
    scripted_service.model = replace(scripted_service.model, context_length=4096)
    scripted_service.engine.script = OUTPUT_TEXT.encode()
    return scripted_service


def test_response_items_have_the_call_type_of_each_tool(openai: OpenAI, service: ScriptedService) -> None:
    raw_response = openai.responses.with_raw_response.create(model=MODEL, input="hi", tools=TOOLS)
    assert (
        raw_response.headers[WARNING_HEADER]
        == "tools.4: 'web_search' is not run by this server; the model is not told of it"
    )
    assert prompt_of(service).startswith("<tool>run<tool>edit<tool>files.list<tool>files.edit<tool>tool_searchuser\n")
    response: Any = raw_response.parse()
    edit_call, list_call, namespace_edit_call, search_call, run_call = response.output
    assert (edit_call.type, edit_call.name, edit_call.input) == ("custom_tool_call", "edit", PATCH)
    assert (list_call.type, list_call.name, list_call.namespace) == ("function_call", "list", "files")
    assert json.loads(list_call.arguments) == {"path": "/"}
    assert (
        namespace_edit_call.type,
        namespace_edit_call.name,
        namespace_edit_call.namespace,
        namespace_edit_call.input,
    ) == ("custom_tool_call", "edit", "files", "x")
    assert (search_call.type, search_call.execution, search_call.arguments) == (
        "tool_search_call",
        "client",
        {"query": "q"},
    )
    assert (run_call.type, run_call.name, run_call.namespace) == ("function_call", "run", None)
    assert [tool.type for tool in response.tools] == [tool["type"] for tool in TOOLS]
    with openai.responses.stream(model=MODEL, input="hi", tools=TOOLS) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()

    def content(output: Any) -> list[Any]:
        return [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in output]

    assert content(final.output) == content(response.output)
    done_events = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert [event.input for event in done_events] == [PATCH, "x"]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH + "x"


def test_responses_input_reads_tool_items_of_all_types(openai: OpenAI, service: ScriptedService) -> None:
    """The input may hold items of this server's answers, and items that only other servers return."""
    first = openai.responses.create(model=MODEL, input="hi", tools=TOOLS)
    service.engine.script = b"done"
    ids = [item.call_id for item in first.output]
    found_tool = {"type": "function", "name": "found", "parameters": {"type": "object"}}
    results: list[Any] = [
        {"type": "custom_tool_call_output", "call_id": ids[0], "output": [{"type": "input_text", "text": "patched"}]},
        {"type": "function_call_output", "call_id": ids[1], "output": "a b"},
        {"type": "custom_tool_call_output", "call_id": ids[2], "output": "edited"},
        {"type": "tool_search_output", "call_id": ids[3], "execution": "client", "tools": [found_tool, RUN]},
        {"type": "function_call_output", "call_id": ids[4], "output": "ran"},
    ]
    next_input: list[Any] = [*HI, *(item.model_dump(exclude_none=True) for item in first.output), *results]
    assert openai.responses.create(model=MODEL, input=next_input, tools=TOOLS).output_text == "done"
    prompt = prompt_of(service)
    assert prompt.startswith("<tool>run<tool>edit<tool>files.list<tool>files.edit<tool>tool_search<tool>founduser\n")
    calls = "".join(
        f"<tool_call>{name}{json.dumps(arguments, ensure_ascii=False)}</tool_call>" for name, arguments in CALLS
    )
    assert f"assistant\n{calls}\n" in prompt
    assert f"tool\npatched{ids[0]}\ntool\na b{ids[1]}\n" in prompt
    exec_action = {"type": "exec", "command": ["ls"], "env": {}}
    foreign_items: list[Any] = [
        {"type": "local_shell_call", "id": "l", "call_id": "l1", "status": "completed", "action": exec_action},
        {"type": "local_shell_call_output", "id": "l1", "output": "a.txt"},
        {"type": "shell_call", "call_id": "s1", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "s1", "output": [{"stdout": "/", "stderr": "", "outcome": {}}]},
        {"type": "apply_patch_call", "call_id": "p1", "operation": {"type": "delete_file", "path": "b"}},
        {"type": "apply_patch_call_output", "call_id": "p1", "status": "completed"},
        {"type": "mcp_call", "id": "m1", "server_label": "s", "name": "ask", "arguments": '{"q": 1}', "output": "yes"},
        {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "q"}, "status": "completed"},
        {"type": "image_generation_call", "id": "i1", "result": "AAAA", "status": "completed"},
    ]
    raw_response = openai.responses.with_raw_response.create(model=MODEL, input=[*HI, *foreign_items], tools=TOOLS[:2])
    prompt = prompt_of(service)
    for part in (
        '<tool_call>local_shell{"type": "exec", "command": ["ls"], "env": {}}</tool_call>\n',
        "tool\na.txtl1\n",
        '<tool_call>shell{"commands": ["pwd"]}</tool_call>',
        '"stdout": "/"',
        '<tool_call>apply_patch{"type": "delete_file", "path": "b"}</tool_call>',
        "tool\ncompletedp1\n",
        '<tool_call>ask{"q": 1}</tool_call>\ntool\nyesm1\n',
    ):
        assert part in prompt, part
    assert "AAAA" not in prompt
    assert raw_response.headers[WARNING_HEADER] == "; ".join(
        f"input.{index}: items of type '{kind}' are left out, as this model reads text"
        for index, kind in ((8, "web_search_call"), (9, "image_generation_call"))
    )


def test_every_tool_type_of_the_openai_client_is_accepted(client: Client, service: ScriptedService) -> None:
    service.engine.script = b"done"
    kinds = {get_args(get_type_hints(tool_param)["type"])[0] for tool_param in get_args(ToolParam)}
    assert {"mcp", "code_interpreter", "local_shell", "shell", "apply_patch", "file_search"} <= kinds
    callable_tools = {"function": RUN, "custom": CUSTOM, "namespace": NAMESPACE, "tool_search": SEARCH}
    for kind in sorted(kinds):
        body = {"model": MODEL, "input": "hi", "tools": [LIST, callable_tools.get(kind, {"type": kind})]}
        answer = client.post("/v1/responses", body)
        assert answer.status_code == 200, (kind, answer.text)
        assert (WARNING_HEADER in answer.headers) == (kind not in callable_tools), kind


def test_tool_choice_may_name_any_callable_tool_type(client: Client, service: ScriptedService) -> None:
    def choice_of(choice: dict[str, Any]) -> Any:
        request, _ = ResponseRequest.read({"input": "hi", "tools": TOOLS, "tool_choice": choice})
        choice_read = request.to_chat().chat.choice
        return choice_read.mode, choice_read.names, choice_read.single

    assert choice_of({"type": "custom", "name": "edit"}) == ("required", ("edit",), True)
    assert choice_of({"type": "function", "name": "list"}) == ("required", ("files.list",), True)
    assert choice_of({"type": "custom", "name": "edit", "namespace": "files"}) == ("required", ("files.edit",), True)
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "custom", "name": "edit"}],
    }
    assert choice_of(allowed) == ("auto", ("edit",), False)
    assert choice_of({"type": "tool_search"}) == ("required", ("tool_search",), True)
    allowed_namespaces = {
        **allowed,
        "mode": "required",
        "tools": [{"type": "namespace", "name": "files"}, {"type": "tool_search"}],
    }
    assert choice_of(allowed_namespaces) == ("required", ("files.list", "files.edit", "tool_search"), False)
    for choice, message_start in (
        ({"type": "web_search"}, "tool_choice.type: 'web_search' is not supported by this server"),
        ({**allowed, "tools": [{"type": "web_search"}]}, "tool_choice: allowed_tools has no tool that this server"),
    ):
        answer = client.post("/v1/responses", {"model": MODEL, "input": "hi", "tools": TOOLS, "tool_choice": choice})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(message_start), answer.text


def test_chat_api_calls_custom_tools(client: Client, service: ScriptedService) -> None:
    tools = [{"type": "custom", "custom": {"name": "edit"}}, {"type": "web_search"}]
    service.engine.script = (
        f'<tool_call>{{"name": "edit", "arguments": {json.dumps({"input": PATCH})}}}</tool_call>'.encode()
    )
    answer = client.chat(messages=HI, tools=tools)
    assert answer.headers[WARNING_HEADER].startswith("tools.1: 'web_search' is not run by this server")
    [choice] = answer.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call == {"id": call["id"], "type": "custom", "custom": {"name": "edit", "input": PATCH}}
    assert choice["finish_reason"] == "tool_calls"
    chunks = [
        json.loads(line[6:])
        for line in client.chat(messages=HI, tools=tools, stream=True).text.splitlines()
        if line.startswith("data: {")
    ]
    [streamed_call] = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (streamed_call["type"], streamed_call["custom"]) == ("custom", {"name": "edit", "input": PATCH})
    service.engine.script = b"done"
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    assert client.chat(messages=[*HI, turn, result], tools=tools).status_code == 200
    assert f"<tool_call>edit{json.dumps({'input': PATCH}, ensure_ascii=False)}</tool_call>" in prompt_of(service)
    empty_call_turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "custom"}]}
    refused = client.chat(messages=[*HI, empty_call_turn], tools=tools)
    assert refused.status_code == 400 and "name and input" in refused.json()["error"]["message"]


def test_custom_tool_input_is_its_only_text_argument_or_the_json_text(client: Client, service: ScriptedService) -> None:
    """Without a grammar the model may call a custom tool with any arguments."""
    tools = [{"type": "custom", "custom": {"name": "edit"}}]
    for arguments, text in (
        ({"input": "a"}, "a"),
        ({"patch": "a"}, "a"),
        ({"a": 1}, '{"a": 1}'),
        ({"a": "b", "c": "d"}, None),
    ):
        call_json = json.dumps({"name": "edit", "arguments": arguments})
        service.engine.script = f"<tool_call>{call_json}</tool_call>".encode()
        [call] = client.chat(messages=HI, tools=tools).json()["choices"][0]["message"]["tool_calls"]
        assert call["custom"]["input"] == (json.dumps(arguments) if text is None else text)


def test_messages_api_ignores_anthropic_hosted_tools_with_a_warning(
    client: Client, service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    service.engine.script = b"done"
    client_tool = {"name": "f", "input_schema": {"type": "object"}}
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        client_tool,
        {"type": "computer_99", "name": "computer"},
    ]
    body = {"model": MODEL, "max_tokens": 9, "messages": HI, "tools": tools}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = client.post("/v1/messages", body)
            assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING_HEADER].count("is not run by this server") == 2
    assert prompt_of(service).startswith("<tool>fuser\n")
    assert len([record for record in caplog.records if "computer_99" in record.getMessage()]) == 1, "logged only once"
    search_use = {"type": "server_tool_use", "id": "u1", "name": "web_search", "input": {"query": "q"}}
    search_page = {"type": "web_search_result", "url": "http://x", "title": "X", "encrypted_content": "SECRET"}
    search_result = {"type": "web_search_tool_result", "tool_use_id": "u1", "content": [search_page]}
    mcp_use = {"type": "mcp_tool_use", "id": "u2", "name": "ask", "server_name": "s", "input": {}}
    mcp_result = {"type": "mcp_tool_result", "tool_use_id": "u2", "content": [{"type": "text", "text": "yes"}]}
    turn = {
        "role": "assistant",
        "content": [search_use, search_result, {"type": "text", "text": "So."}, mcp_use, mcp_result],
    }
    answer = client.post("/v1/messages", {**body, "messages": [*HI, turn, *HI]})
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(service)
    assert '<tool_call>web_search{"query": "q"}</tool_call>\ntool\n[{' in prompt
    assert '"url": "http://x"' in prompt and "SECRET" not in prompt
    assert "assistant\nSo.<tool_call>ask{}</tool_call>\ntool\nyesu2" in prompt
