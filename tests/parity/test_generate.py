"""`aerie generate`: a folder and a prompt, whatever the draft; its text is what a REST client would get."""

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
from tests.tiny import draft_folder, target_folder
from tests.unit.models import draft_folders as write

VOCAB = 64
IDS = ["--prompt-token-ids", "5,6,7"]


@pytest.fixture(scope="module")
def with_words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target whose tokens are words of three letters with a space before each, as SentencePiece has them."""
    folder = tmp_path_factory.mktemp("words") / "target"
    shutil.copytree(target_folder(), folder)
    words = {f"\u2581{chr(97 + i // 26)}{chr(97 + i % 26)}x": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocab=words, unk_token="\u2581aax"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), MetaspaceDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def generate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["generate", *words, "--dtype", "float64", "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_generate_accepts_model_and_prompt_in_any_order_and_form(
    with_words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--max-tokens", "3"]
    first = generate(capsys, with_words, "abx acx", *few)
    assert len(str(first["text"]).split()) == 3
    for words in (
        [with_words, *few, "abx acx"],
        [*few, with_words, "abx acx"],
        ["--model", with_words, "--prompt", "abx acx", *few],
        ["--model", with_words, *few, "abx acx"],
        [with_words, *few, "--prompt", "abx acx"],
    ):
        assert generate(capsys, *words)["token_ids"] == first["token_ids"], words


class Pipe(io.StringIO):
    """Remembers how much was written whenever it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[int] = []

    def flush(self) -> None:
        self.flushed.append(len(self.getvalue()))


@pytest.mark.parametrize("words", [["abx acx"], IDS], ids=["text", "ids"])
def test_generate_flushes_output_after_every_step(
    with_words: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [with_words if words != IDS else target_folder(), *words, "--max-tokens", "9", "--ignore-eos"]
    whole = generate(capsys, *asked)
    text = whole["text"] if words != IDS else ",".join(map(str, whole["token_ids"]))  # type: ignore[call-overload]
    pipe = Pipe()
    monkeypatch.setattr(sys, "stdout", pipe)
    assert main(["generate", *asked, "--dtype", "float64"]) == 0
    said, _, summary = pipe.getvalue().rpartition("\n[")
    assert said == text
    assert summary.startswith(f"9 tokens in {9 + OVERLAP} steps and ") and summary.endswith(", finished by length]\n")
    grown = sorted({size for size in pipe.flushed if 0 < size <= len(said)})
    assert len(grown) == 9, "a flush per step"


def test_generate_ends_quietly_when_its_reader_closes_the_pipe() -> None:
    words = ["generate", target_folder(), *IDS, "--ignore-eos", "--max-tokens", "400"]
    with subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60), first.isdigit()) == (b"", 141, True)


@pytest.mark.parametrize(
    ("words", "said"),
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
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *words]) == 2
    assert said in capsys.readouterr().err


def test_stop_string_may_begin_with_the_space_before_a_word(
    with_words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoded alone the output loses that space, so the stop string is not in it."""
    words = [with_words, "abx acx", "--max-tokens", "9"]
    text = str(generate(capsys, *words)["text"])
    assert text.startswith(" ")
    first, second = text.split()[:2]
    assert generate(capsys, *words, "--stop", f" {first}")["text"] == ""
    assert generate(capsys, *words, "--stop", f" {second}")["text"] == f" {first}"


def test_generate_default_max_tokens_is_limited_by_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    whole = generate(capsys, target_folder(), *IDS, "--ignore-eos")
    assert len(whole["token_ids"]) == 128  # type: ignore[arg-type]
    small = target_folder(max_position=20)
    cut = generate(capsys, small, *IDS, "--ignore-eos")
    assert (len(cut["token_ids"]), cut["finish_reason"]) == (17, "length")  # type: ignore[arg-type]
    assert main(["generate", small, *IDS, "--max-tokens", "18"]) == 2


def test_context_length_option_sets_the_context_of_a_local_engine_only(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    small = target_folder(max_position=20)
    for length in (12, 30):
        cut = generate(capsys, small, *IDS, "--ignore-eos", "--context-length", str(length))
        assert (len(cut["token_ids"]), cut["finish_reason"]) == (length - 3, "length")  # type: ignore[arg-type]
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
    given = generate(capsys, target_folder(), *IDS, "--draft", DRAFTS[kind]())
    assert given["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(("kind", "steps"), [("EAGLE", 3), ("EAGLE3", 3), ("NEXTN", 3), ("NEXTN of two layers", 2)])
def test_resolved_settings_have_draft_algorithm_and_a_fitting_step_count(kind: str, steps: int) -> None:
    config = config_of(target_folder(), max_total_tokens=512).model_copy(
        update={"speculative_draft_model_path": DRAFTS[kind]()}
    )
    info = build_engine(config).info()
    assert info.draft is not None
    assert info.config.speculative_algorithm == info.draft.algorithm == kind.split()[0]
    assert info.speculative_num_steps == steps
