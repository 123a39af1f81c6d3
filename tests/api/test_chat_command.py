"""`aerie chat` as its users meet it, on a terminal and in a pipe: with the demo pair here, and with a server."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cluster.bench.server import ServerProcess
from cluster.cli import main
from tests.actors.conftest import CHECKOUT
from tests.api.apps import eventually
from tests.api.pty_command import CTRL_C, CTRL_D, PtyCommand
from tests.api.scripted import MODEL, Client, ScriptedService, save_tokenizer
from tests.tiny import target_folder

TARGET, DRAFT = str(CHECKOUT / "models/demo/target"), str(CHECKOUT / "models/demo/draft")
PAIR = [TARGET, "--draft", DRAFT, "--dtype", "float64"]
FEW = ["--max-tokens", "40", "--seed", "7"]
PROMPT = "\n> "
RUN = r"\x1b\[3[56]m(.*?)\x1b\[0m"
SUMMARY = r"\n\x1b\[2m\[(\d+) tokens, accept length ([\d.]+), ([\d.]+) tokens/s, finished by (\w+)\]\x1b\[0m"


def generated(prompt: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """What `aerie generate` says to a prompt that is written out, as a chat samples."""
    assert main(["generate", *PAIR, *FEW, "--temperature", "1", "--prompt", prompt, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def turn(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "chat", *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, cwd=CHECKOUT)


@pytest.mark.slow
def test_chat_command_holds_a_conversation_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    first = generated(turn("import os"), capsys)
    told = generated(f"{turn('import os')}{first['text']}<|im_end|>\n{turn('class Queue:')}", capsys)
    with PtyCommand("chat", *PAIR, *FEW) as chat:
        chat.until(PROMPT)
        for question, answer in (("import os", first), ("class Queue:", told)):
            chat.press(f"{question}\n")
            shown = chat.until(SUMMARY)
            runs = re.findall(RUN, shown, re.DOTALL)
            assert "".join(runs) == answer["text"], "each run has a colour"
            colours = re.findall(r"\x1b\[(3[56])m", shown)
            assert len(set(colours)) == 2 and len(colours) > 8
            found = re.search(SUMMARY, shown)
            assert found is not None
            assert int(found[1]) == len(answer["token_ids"])  # type: ignore[arg-type]
            assert (found[2], found[4]) == (f"{answer['accept_length']:.2f}", answer["finish_reason"])
            assert chat.until(PROMPT)
        chat.press("/reset\nimport os\n")
        shown = chat.until(SUMMARY)
        assert "".join(re.findall(RUN, shown, re.DOTALL)) == first["text"], "all else is forgotten"
        chat.until(PROMPT)
        chat.press(CTRL_D)
        assert chat.status() == 0


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    said = generated(turn("import os"), capsys)["text"]
    with PtyCommand("chat", *PAIR, *FEW) as chat:
        chat.until(PROMPT)
        chat.press("/set max_tokens 4000\n/set ignore_eos true\nclass Queue:\n")
        for _ in range(3):
            chat.until(RUN)
        chat.press(CTRL_C)
        tokens = re.search(r"\[(\d+) tokens,.*, stopped\]", chat.until(r"stopped\]"))
        assert tokens is not None and int(tokens[1]) < 4000
        chat.until(PROMPT)
        chat.press("half a line")
        chat.until("half a line")
        chat.press(CTRL_C)
        chat.until(PROMPT, again=CTRL_C)
        chat.press("/reset\n/set max_tokens 40\n/set ignore_eos\nimport os\n")
        shown = chat.until(SUMMARY)
        assert "".join(re.findall(RUN, shown, re.DOTALL)) == said
        chat.press("/exit\n")
        assert chat.status() == 0


def test_no_color_variable_turns_off_terminal_colors(url: str, service: ScriptedService) -> None:
    service.engine.script = b"plain words"
    with PtyCommand("chat", "--url", url, NO_COLOR="1") as chat:
        chat.until("> ")
        chat.press("hi\n")
        assert "plain words\n[12 tokens" in chat.until("finished by stop]")
        assert not re.search(r"\x1b\[\d*m", chat.shown)


@pytest.mark.slow
@pytest.mark.ray
def test_chat_command_prints_the_same_text_for_server_and_local_engine() -> None:
    """Three doors to one pair: a chat over HTTP, the route itself, and a chat in this process."""
    settings = [f"model_path={TARGET}", f"speculative_draft_model_path={DRAFT}", "dtype=float64", "model_id=pair"]
    with ServerProcess(settings) as server:
        url = f"http://127.0.0.1:{server.port}"
        body = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 40, "seed": 7}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        there = piped("import os\n", "--url", url, *FEW)
        other = piped("import os\n", "--url", url, "--model", "another")
    here = piped("import os\n", *PAIR, *FEW)
    said, counts = answer["choices"][0], answer["metrics"]["speculative_decoding"]
    summary = (
        f"\n[{answer['usage']['completion_tokens']} tokens, accept length {counts['mean_acceptance_length']:.2f}, "
    )
    for done in (there, here):
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(said["message"]["content"] + summary)
        assert done.stdout.endswith(f" tokens/s, finished by {said['finish_reason']}]\n")
    assert other.returncode == 1
    assert other.stderr == "aerie chat: the model 'another' does not exist; this server has 'pair'\n"


def test_chat_command_sends_settings_history_and_system_prompt(
    url: str, service: ScriptedService, client: Client
) -> None:
    done = piped("/set temperature 0.5\nhi\n\nmore\n/system be brief\n /x\n", "--url", f"{url}/v1", *FEW)
    assert (done.returncode, done.stderr) == (0, "")
    first = client.chat(temperature=0.5, seed=7, max_tokens=40).json()["choices"][0]["message"]["content"]
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}]
    asked.append({"role": "user", "content": "more"})
    second = client.chat(messages=asked, temperature=0.5, seed=7, max_tokens=40).json()["choices"][0]["message"][
        "content"
    ]
    asked += [{"role": "assistant", "content": second}, {"role": "user", "content": " /x"}]
    asked.insert(0, {"role": "system", "content": "be brief"})
    client.chat(messages=asked, temperature=0.5, seed=7, max_tokens=40)
    sent = [(request.prompt_token_ids, request.params) for request in service.engine.requests]
    assert len(sent) == 6 and sent[:3] == sent[3:]
    assert done.stdout.split("\n")[1] == first


def test_ctrl_c_ends_the_request_at_the_server(url: str, service: ScriptedService) -> None:
    service.engine.script, service.engine.step_s = b"word " * 90, 0.05
    with PtyCommand("chat", "--url", url) as chat:
        chat.until("> ")
        chat.press("hi\n")
        chat.until(RUN)
        chat.press(CTRL_C)
        chat.until(r"stopped\]")
        assert eventually(lambda: len(service.engine.aborted) == 1 and not service.engine.running)
        service.engine.step_s, service.engine.script = 0.0, b"done"
        chat.press("again\n")
        chat.until(SUMMARY)
        chat.until(PROMPT)
        chat.press(CTRL_D)
        assert chat.status() == 0


def test_chat_command_prints_a_server_error_as_a_single_line(url: str, service: ScriptedService) -> None:
    lines = "refuse\n/bad\n/set top_p 7\nhi\n"
    done = piped(lines, "--url", url, "--max-tokens", "3")
    assert done.returncode == 1 and "[3 tokens" in done.stdout, "the last question was answered"
    said = done.stderr.splitlines()
    assert [line.removeprefix("aerie chat: ").split(":")[0] for line in said] == [
        "messages",
        "there is no command '/bad'; /help lists them",
        "top_p",
    ]
    service.engine.queue_is_full = True
    full = piped("hi\n", "--url", url)
    assert (full.returncode, full.stdout) == (1, "")
    assert full.stderr.startswith("aerie chat: the queue holds") and full.stderr.endswith("(try again in 1 s)\n")
    service.engine.queue_is_full, service.engine.fail_at = False, 3
    failed = piped("hi\n", "--url", url)
    assert failed.returncode == 1 and failed.stdout and failed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "give either MODEL or --url"),
        (["DIR", "--url", "http://127.0.0.1:1"], 2, "give either MODEL or --url"),
        (["--url", "http://127.0.0.1:1", "--draft", "D"], 2, "--draft is for an engine in this process"),
        (["--url", "nonsense"], 2, "--url must be as"),
        (["--url", "http://127.0.0.1:1"], 1, "no answer from http://127.0.0.1:1: Connection refused"),
        (["DIR", "--model", MODEL], 2, "--model and --api-key go with --url"),
        (["DIR", "--temperature", "hot"], 2, "temperature: must be a number"),
        (["DIR"], 2, "a chat needs a tokenizer"),
    ],
)
def test_chat_command_reports_bad_arguments_in_a_single_line(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    given = [target_folder() if word == "DIR" else word for word in words]
    capsys.readouterr()
    assert main(["chat", *given]) == status
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_model_without_a_chat_template_is_refused_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tokenizer(tmp_path, template=None)
    for path in Path(target_folder(vocab=300)).iterdir():
        (folder / path.name).symlink_to(path)
    assert main(["chat", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "has no chat template" in error and "aerie generate" in error
