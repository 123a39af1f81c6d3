"""`aerie chat` on a terminal and in a pipe: with the demo pair in its own process, and with a server."""

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
from tests.serving.actors.conftest import CHECKOUT
from tests.serving.api.apps import eventually
from tests.serving.api.pty_command import CTRL_C, CTRL_D, PtyCommand
from tests.serving.api.scripted import MODEL, Client, ScriptedService, save_tokenizer
from tests.support.tiny_checkpoints import target_folder

TARGET, DRAFT = str(CHECKOUT / "models/demo/target"), str(CHECKOUT / "models/demo/draft")
PAIR_FLAGS = [TARGET, "--draft", DRAFT, "--dtype", "float64"]
SAMPLING_FLAGS = ["--max-tokens", "40", "--seed", "7"]
PROMPT = "\n> "
COLOURED_TEXT = r"\x1b\[3[56]m(.*?)\x1b\[0m"
SUMMARY = r"\n\x1b\[2m\[(\d+) tokens, accept length ([\d.]+), ([\d.]+) tokens/s, finished by (\w+)\]\x1b\[0m"


def generate_answer(prompt: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """The answer of `aerie generate` to a complete prompt, with the sampling settings of a chat."""
    assert main(["generate", *PAIR_FLAGS, *SAMPLING_FLAGS, "--temperature", "1", "--prompt", prompt, "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def user_turn(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def run_piped_chat(input_text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "chat", *arguments]
    return subprocess.run(command, input=input_text, capture_output=True, text=True, timeout=120, cwd=CHECKOUT)


@pytest.mark.slow
def test_chat_command_holds_a_conversation_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    first = generate_answer(user_turn("import os"), capsys)
    second = generate_answer(f"{user_turn('import os')}{first['text']}<|im_end|>\n{user_turn('class Queue:')}", capsys)
    with PtyCommand("chat", *PAIR_FLAGS, *SAMPLING_FLAGS) as chat:
        chat.read_until(PROMPT)
        for question, answer in (("import os", first), ("class Queue:", second)):
            chat.press(f"{question}\n")
            output = chat.read_until(SUMMARY)
            coloured_texts = re.findall(COLOURED_TEXT, output, re.DOTALL)
            assert "".join(coloured_texts) == answer["text"], "a part of the text has no colour"
            colours = re.findall(r"\x1b\[(3[56])m", output)
            assert len(set(colours)) == 2 and len(colours) > 8
            summary = re.search(SUMMARY, output)
            assert summary is not None
            assert int(summary[1]) == len(answer["token_ids"])  # type: ignore[arg-type]
            # The engine of `aerie generate` may choose other trees. So the accept length is compared with the steps
            # that the terminal shows: each step has a colour of its own, except a last one that only ends the answer.
            shown_steps = len(colours) - 1
            accept_lengths = {f"{(int(summary[1]) - 1) / steps:.2f}" for steps in (shown_steps, shown_steps + 1)}
            assert summary[2] in accept_lengths and summary[4] == answer["finish_reason"]
            assert chat.read_until(PROMPT)
        chat.press("/reset\nimport os\n")
        output = chat.read_until(SUMMARY)
        assert "".join(re.findall(COLOURED_TEXT, output, re.DOTALL)) == first["text"], "/reset kept the history"
        chat.read_until(PROMPT)
        chat.press(CTRL_D)
        assert chat.exit_status() == 0


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    expected_text = generate_answer(user_turn("import os"), capsys)["text"]
    with PtyCommand("chat", *PAIR_FLAGS, *SAMPLING_FLAGS) as chat:
        chat.read_until(PROMPT)
        chat.press("/set max_tokens 4000\n/set ignore_eos true\nclass Queue:\n")
        for _ in range(3):
            chat.read_until(COLOURED_TEXT)
        chat.press(CTRL_C)
        stopped_summary = re.search(r"\[(\d+) tokens,.*, stopped\]", chat.read_until(r"stopped\]"))
        assert stopped_summary is not None and int(stopped_summary[1]) < 4000
        chat.read_until(PROMPT)
        chat.press("half a line")
        chat.read_until("half a line")
        chat.press(CTRL_C)
        chat.read_until(PROMPT, repeated_keys=CTRL_C)
        chat.press("/reset\n/set max_tokens 40\n/set ignore_eos\nimport os\n")
        output = chat.read_until(SUMMARY)
        assert "".join(re.findall(COLOURED_TEXT, output, re.DOTALL)) == expected_text
        chat.press("/exit\n")
        assert chat.exit_status() == 0


def test_no_color_variable_turns_off_terminal_colors(url: str, service: ScriptedService) -> None:
    service.engine.script = b"plain words"
    with PtyCommand("chat", "--url", url, NO_COLOR="1") as chat:
        chat.read_until("> ")
        chat.press("hi\n")
        assert "plain words\n[12 tokens" in chat.read_until("finished by stop]")
        assert not re.search(r"\x1b\[\d*m", chat.output)


@pytest.mark.slow
@pytest.mark.ray
def test_chat_command_prints_the_same_text_for_server_and_local_engine() -> None:
    """Three ways to the same pair: `aerie chat` with a server, the server's HTTP route, `aerie chat` with an engine."""
    settings = [f"model_path={TARGET}", f"speculative_draft_model_path={DRAFT}", "dtype=float64", "model_id=pair"]
    with ServerProcess(settings) as server:
        url = f"http://127.0.0.1:{server.port}"
        body = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 40, "seed": 7}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        remote_chat = run_piped_chat("import os\n", "--url", url, *SAMPLING_FLAGS)
        unknown_model_chat = run_piped_chat("import os\n", "--url", url, "--model", "another")
    local_chat = run_piped_chat("import os\n", *PAIR_FLAGS, *SAMPLING_FLAGS)
    choice, counts = answer["choices"][0], answer["metrics"]["speculative_decoding"]
    summary = (
        f"\n[{answer['usage']['completion_tokens']} tokens, accept length {counts['mean_acceptance_length']:.2f}, "
    )
    for chat_process in (remote_chat, local_chat):
        assert (chat_process.returncode, chat_process.stderr) == (0, "")
        assert chat_process.stdout.startswith(choice["message"]["content"] + summary)
        assert chat_process.stdout.endswith(f" tokens/s, finished by {choice['finish_reason']}]\n")
    assert unknown_model_chat.returncode == 1
    assert unknown_model_chat.stderr == "aerie chat: the model 'another' does not exist; this server has 'pair'\n"


def test_chat_command_sends_settings_history_and_system_prompt(
    url: str, service: ScriptedService, client: Client
) -> None:
    chat_process = run_piped_chat(
        "/set temperature 0.5\nhi\n\nmore\n/system be brief\n /x\n", "--url", f"{url}/v1", *SAMPLING_FLAGS
    )
    assert (chat_process.returncode, chat_process.stderr) == (0, "")
    first = client.chat(temperature=0.5, seed=7, max_tokens=40).json()["choices"][0]["message"]["content"]
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}]
    history.append({"role": "user", "content": "more"})
    second = client.chat(messages=history, temperature=0.5, seed=7, max_tokens=40).json()["choices"][0]["message"][
        "content"
    ]
    history += [{"role": "assistant", "content": second}, {"role": "user", "content": " /x"}]
    history.insert(0, {"role": "system", "content": "be brief"})
    client.chat(messages=history, temperature=0.5, seed=7, max_tokens=40)
    sent_requests = [(request.prompt_token_ids, request.params) for request in service.engine.requests]
    assert len(sent_requests) == 6 and sent_requests[:3] == sent_requests[3:]
    assert chat_process.stdout.split("\n")[1] == first


def test_ctrl_c_ends_the_request_at_the_server(url: str, service: ScriptedService) -> None:
    service.engine.script, service.engine.step_s = b"word " * 90, 0.05
    with PtyCommand("chat", "--url", url) as chat:
        chat.read_until("> ")
        chat.press("hi\n")
        chat.read_until(COLOURED_TEXT)
        chat.press(CTRL_C)
        chat.read_until(r"stopped\]")
        assert eventually(lambda: len(service.engine.aborted) == 1 and not service.engine.running)
        service.engine.step_s, service.engine.script = 0.0, b"done"
        chat.press("again\n")
        chat.read_until(SUMMARY)
        chat.read_until(PROMPT)
        chat.press(CTRL_D)
        assert chat.exit_status() == 0


def test_chat_command_prints_a_server_error_as_a_single_line(url: str, service: ScriptedService) -> None:
    typed_lines = "refuse\n/bad\n/set top_p 7\nhi\n"
    chat_process = run_piped_chat(typed_lines, "--url", url, "--max-tokens", "3")
    assert chat_process.returncode == 1 and "[3 tokens" in chat_process.stdout, "the last question was answered"
    error_lines = chat_process.stderr.splitlines()
    assert [line.removeprefix("aerie chat: ").split(":")[0] for line in error_lines] == [
        "messages",
        "there is no command '/bad'; /help lists them",
        "top_p",
    ]
    service.engine.queue_is_full = True
    overloaded_chat = run_piped_chat("hi\n", "--url", url)
    assert (overloaded_chat.returncode, overloaded_chat.stdout) == (1, "")
    assert overloaded_chat.stderr.startswith("aerie chat: the queue holds") and overloaded_chat.stderr.endswith(
        "(try again in 1 s)\n"
    )
    service.engine.queue_is_full, service.engine.fail_at = False, 3
    failed_chat = run_piped_chat("hi\n", "--url", url)
    assert failed_chat.returncode == 1 and failed_chat.stdout and failed_chat.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message_part"),
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
    arguments: list[str],
    status: int,
    message_part: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    chat_arguments = [target_folder() if argument == "DIR" else argument for argument in arguments]
    capsys.readouterr()
    assert main(["chat", *chat_arguments]) == status
    error = capsys.readouterr().err
    assert message_part in error and error.count("\n") == 1


def test_a_model_without_a_chat_template_is_refused_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tokenizer(tmp_path, template=None)
    for path in Path(target_folder(vocab=300)).iterdir():
        (folder / path.name).symlink_to(path)
    assert main(["chat", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "has no chat template" in error and "aerie generate" in error
