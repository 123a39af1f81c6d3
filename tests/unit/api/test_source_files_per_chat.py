"""How many files of the code a reader must open to follow one chat request: few, so that a stranger finds the way."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import cluster
from cluster.api.http.routes import make_app
from tests.api.scripted import TEMPLATE, Client, ScriptedService, save_tokenizer

PACKAGE = Path(cluster.__file__).parent
MOST_PLAIN, MOST_WITH_TOOLS = 15, 19
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def files_of_a_chat(service: ScriptedService, **fields: Any) -> set[str]:
    """The files of cluster/api and cluster/chat in which a function runs for one chat request."""
    client, seen = Client(make_app(service)), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        answer = client.chat(**fields)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    ours = [Path(name).relative_to(PACKAGE) for name in seen if Path(name).is_relative_to(PACKAGE)]
    return {str(name) for name in ours if name.parts[0] in ("api", "chat")}


def test_plain_chat_request_enters_few_source_files(tmp_path: Path) -> None:
    found = files_of_a_chat(ScriptedService(save_tokenizer(tmp_path)), max_tokens=4)
    assert len(found) <= MOST_PLAIN, sorted(found)


def test_streamed_chat_with_tool_call_enters_few_source_files(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    service = ScriptedService(save_tokenizer(tmp_path, template, ("<tool_call>", "</tool_call>")))
    service.engine.script = b'<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = files_of_a_chat(service, tools=[TOOL], stream=True)
    assert "chat/blocks.py" in found, "the call was not parsed"
    assert len(found) <= MOST_WITH_TOOLS, sorted(found)
