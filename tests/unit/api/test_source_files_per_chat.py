"""A reader must open only a few source files to follow one chat request through the code."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import cluster
from cluster.api.http.routes import make_app
from tests.serving.api.scripted import TEMPLATE, Client, ScriptedService, save_tokenizer

PACKAGE = Path(cluster.__file__).parent
MAX_FILES_PLAIN, MAX_FILES_WITH_TOOLS = 15, 19
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def source_files_of_chat(service: ScriptedService, **fields: Any) -> set[str]:
    """The files of cluster/api and cluster/chat in which a function runs for one chat request."""
    client, entered_files = Client(make_app(service)), set[str]()

    def record_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered_files.add(frame.f_code.co_filename)

    threading.setprofile(record_call)
    sys.setprofile(record_call)
    try:
        answer = client.chat(**fields)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    package_files = [Path(name).relative_to(PACKAGE) for name in entered_files if Path(name).is_relative_to(PACKAGE)]
    return {str(name) for name in package_files if name.parts[0] in ("api", "chat")}


def test_plain_chat_request_enters_few_source_files(tmp_path: Path) -> None:
    found = source_files_of_chat(ScriptedService(save_tokenizer(tmp_path)), max_tokens=4)
    assert len(found) <= MAX_FILES_PLAIN, sorted(found)


def test_streamed_chat_with_tool_call_enters_few_source_files(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    service = ScriptedService(save_tokenizer(tmp_path, template, ("<tool_call>", "</tool_call>")))
    service.engine.script = b'<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = source_files_of_chat(service, tools=[TOOL], stream=True)
    assert "chat/blocks.py" in found, "the call was not parsed"
    assert len(found) <= MAX_FILES_WITH_TOOLS, sorted(found)
