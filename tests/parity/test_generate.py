"""The command `aerie generate`: it takes a model folder, a prompt and any draft, and prints the generated text."""

import io
import json
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

from cluster.cli import main
from cluster.engine import build_engine
from tests.parity.harness import OVERLAP, config_of
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.models import draft_folders as write

VOCAB = 64
IDS = ["--prompt-token-ids", "5,6,7"]


@pytest.fixture(scope="module")
def word_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a target with a tokenizer. Each token is a word of three letters with a space before it, as in
    SentencePiece.
    """
    folder = tmp_path_factory.mktemp("words") / "target"
    shutil.copytree(target_folder(), folder)
    words = {f"\u2581{chr(97 + i // 26)}{chr(97 + i % 26)}x": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocab=words, unk_token="\u2581aax"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), MetaspaceDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["generate", *arguments, "--dtype", "float64", "--json"]) == 0
    response: dict[str, object] = json.loads(capsys.readouterr().out)
    return response


def test_generate_accepts_model_and_prompt_in_any_order_and_form(
    word_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    max_tokens_option = ["--max-tokens", "3"]
    first = generate(capsys, word_target, "abx acx", *max_tokens_option)
    assert len(str(first["text"]).split()) == 3
    for arguments in (
        [word_target, *max_tokens_option, "abx acx"],
        [*max_tokens_option, word_target, "abx acx"],
        ["--model", word_target, "--prompt", "abx acx", *max_tokens_option],
        ["--model", word_target, *max_tokens_option, "abx acx"],
        [word_target, *max_tokens_option, "--prompt", "abx acx"],
    ):
        assert generate(capsys, *arguments)["token_ids"] == first["token_ids"], arguments


class RecordingPipe(io.StringIO):
    """A text stream that records its size at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed_sizes: list[int] = []

    def flush(self) -> None:
        self.flushed_sizes.append(len(self.getvalue()))


@pytest.mark.parametrize("prompt_arguments", [["abx acx"], IDS], ids=["text", "ids"])
def test_generate_flushes_output_after_every_step(
    word_target: str, prompt_arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        word_target if prompt_arguments != IDS else target_folder(),
        *prompt_arguments,
        "--max-tokens",
        "9",
        "--ignore-eos",
    ]
    full_response = generate(capsys, *arguments)
    text = full_response["text"] if prompt_arguments != IDS else ",".join(map(str, full_response["token_ids"]))  # type: ignore[call-overload]
    pipe = RecordingPipe()
    monkeypatch.setattr(sys, "stdout", pipe)
    assert main(["generate", *arguments, "--dtype", "float64"]) == 0
    printed_text, _, summary = pipe.getvalue().rpartition("\n[")
    assert printed_text == text
    assert summary.startswith(f"9 tokens in {9 + OVERLAP} steps and ") and summary.endswith(", finished by length]\n")
    text_sizes = sorted({size for size in pipe.flushed_sizes if 0 < size <= len(printed_text)})
    assert len(text_sizes) == 9, "the output was not flushed once per step"


def test_generate_ends_quietly_when_its_reader_closes_the_pipe() -> None:
    arguments = ["generate", target_folder(), *IDS, "--ignore-eos", "--max-tokens", "400"]
    with subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60), first.isdigit()) == (b"", 141, True)


@pytest.mark.parametrize(
    ("arguments", "expected_error"),
    [
        ([], "no model is given"),
        (["DIR"], "give one prompt"),
        (["DIR", "a", "--prompt", "b"], "give one prompt"),
        (["DIR", "a", *IDS], "give one prompt"),
        (["DIR", "a", "--model", "D"], "the model is given twice"),
        (["/no/such/folder", "a"], "'/no/such/folder' does not exist"),
    ],
)
def test_generate_reports_missing_or_duplicate_arguments(
    arguments: list[str], expected_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == 2
    assert expected_error in capsys.readouterr().err


def test_stop_string_may_begin_with_the_space_before_a_word(
    word_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the output were decoded without the prompt, it would lose its first space, and the stop string would not be
    found in it.
    """
    arguments = [word_target, "abx acx", "--max-tokens", "9"]
    text = str(generate(capsys, *arguments)["text"])
    assert text.startswith(" ")
    first, second = text.split()[:2]
    assert generate(capsys, *arguments, "--stop", f" {first}")["text"] == ""
    assert generate(capsys, *arguments, "--stop", f" {second}")["text"] == f" {first}"


def test_generate_default_max_tokens_is_limited_by_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    full_response = generate(capsys, target_folder(), *IDS, "--ignore-eos")
    assert len(full_response["token_ids"]) == 128  # type: ignore[arg-type]
    small_target = target_folder(max_position=20)
    limited_response = generate(capsys, small_target, *IDS, "--ignore-eos")
    assert (len(limited_response["token_ids"]), limited_response["finish_reason"]) == (17, "length")  # type: ignore[arg-type]
    assert main(["generate", small_target, *IDS, "--max-tokens", "18"]) == 2


def test_context_length_option_sets_the_context_of_a_local_engine_only(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    small_target = target_folder(max_position=20)
    for length in (12, 30):
        limited_response = generate(capsys, small_target, *IDS, "--ignore-eos", "--context-length", str(length))
        assert (len(limited_response["token_ids"]), limited_response["finish_reason"]) == (length - 3, "length")  # type: ignore[arg-type]
    assert "context_length 30 is beyond the 20 tokens" in caplog.text
    capsys.readouterr()
    assert main(["chat", "--url", "http://127.0.0.1:1", "--context-length", "30"]) == 2
    assert "--context-length is for an engine in this process" in capsys.readouterr().err


DRAFTS = {
    "EAGLE": lambda: write.eagle1(vocab=VOCAB),
    "EAGLE3": lambda: draft_folder(target_folder()),
    "NEXTN": lambda: write.mtp("mimo", vocab=VOCAB),
    "NEXTN of two layers": lambda: write.mtp("mimo", 2, vocab=VOCAB),
}


@pytest.mark.parametrize(
    "kind", ["EAGLE3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in DRAFTS if kind != "EAGLE3")]
)
def test_generate_recognises_a_draft_of_any_kind(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = generate(capsys, target_folder(), *IDS)
    response = generate(capsys, target_folder(), *IDS, "--draft", DRAFTS[kind]())
    assert response["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(("kind", "steps"), [("EAGLE", 3), ("EAGLE3", 3), ("NEXTN", 3), ("NEXTN of two layers", 2)])
def test_resolved_settings_have_draft_algorithm_and_a_fitting_step_count(kind: str, steps: int) -> None:
    config = config_of(target_folder(), max_total_tokens=512).model_copy(
        update={"speculative_draft_model_path": DRAFTS[kind]()}
    )
    info = build_engine(config).info()
    assert info.draft is not None
    assert info.config.speculative_algorithm == info.draft.algorithm == kind.split()[0]
    assert info.speculative_num_steps == steps
