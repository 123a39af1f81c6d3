"""The training corpus: the held-out split, prompts from the held-out files, and windows of the training ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cluster.train import dataset
from cluster.train.corpus import chat_examples, heldout_files, heldout_prompts, is_heldout, texts, train_files
from cluster.train.dataset import Windows, encode_corpus, with_repeats
from cluster.train.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    trained: Tokenizer = train_tokenizer(texts(train_files()[:10]), 400)
    return PreTrainedTokenizerFast(tokenizer_object=trained)


def test_heldout_split_is_disjoint_and_of_the_expected_size() -> None:
    train, heldout = set(train_files()), set(heldout_files())
    assert not train & heldout
    assert 0.02 < len(heldout) / len(train) < 0.1
    assert all(is_heldout(path) for path in heldout)
    assert not any(is_heldout(path) for path in train)


def test_heldout_split_depends_only_on_the_path() -> None:
    names = ("typing.py", "queue.py", "socket.py", "json/decoder.py", "argparse.py", "ast.py")
    assert [path for path in names if is_heldout(path)] == ["typing.py", "queue.py", "socket.py"]


def test_cached_ids_are_those_of_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of an earlier run is not used for another tokenizer or for another number of files."""
    monkeypatch.setattr(dataset, "chat_documents", lambda tokenizer, count: [])  # making chats reads the whole library
    for size in (300, 340):
        save_tokenizer(train_tokenizer(texts(train_files()[:4]), size), tmp_path / str(size))
    small, large = (load_tokenizer(tmp_path / str(size)) for size in (300, 340))
    cache = tmp_path / "corpus.npz"
    first_ids, _ = encode_corpus(small, cache, files=4)
    written_at_ns = cache.stat().st_mtime_ns
    repeated_ids, _ = encode_corpus(small, cache, files=4)
    assert np.array_equal(first_ids, repeated_ids) and cache.stat().st_mtime_ns == written_at_ns
    other_tokenizer_ids, _ = encode_corpus(large, cache, files=4)
    assert other_tokenizer_ids.max() >= 300 > first_ids.max() and len(encode_corpus(large, cache, files=6)[0]) > len(
        other_tokenizer_ids
    )


def test_corpus_excludes_generated_and_site_packages_files() -> None:
    for path in train_files() + heldout_files():
        assert "site-packages" not in path
        assert "_sysconfigdata" not in path


def test_heldout_prompts_are_reproducible_and_depend_on_the_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = heldout_prompts(tokenizer, 12, 64, seed=0)
    assert [len(prompt) for prompt in prompts] == [64] * 12
    assert prompts == heldout_prompts(tokenizer, 12, 64, seed=0)
    assert prompts != heldout_prompts(tokenizer, 12, 64, seed=1)
    assert prompts[:5] == heldout_prompts(tokenizer, 5, 64, seed=0)


def test_chat_examples_have_function_questions_and_valid_python_answers() -> None:
    for example in chat_examples(train_files()[:40], 5, seed=0):
        compile(example.answer, "answer", "exec")
        assert "Write the Python function" in example.question


def test_tokenizer_merges_a_line_break_with_its_indentation(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "if x:\n        return\n\n    pass\n\ty = 1é\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "\n        " in {tokenizer.decode([token]) for token in tokenizer.encode(text)}


def test_windows_are_reproducible_and_cover_an_epoch_once() -> None:
    windows = Windows(np.arange(1000), length=10, batch=9, seed=3)
    assert windows.per_epoch == 99
    starts = [int(row[0]) for step in range(11) for row in windows(step)]
    assert len({start // 10 for start in starts}) == 99
    assert windows(5).equal(Windows(np.arange(1000), length=10, batch=9, seed=3)(5))
    with pytest.raises(ValueError, match="too few"):
        Windows(np.arange(5), length=10, batch=1, seed=0)


def test_with_repeats_replaces_only_the_requested_share_of_rows() -> None:
    ids = torch.arange(4 * 64).view(4, 64)
    repeated = with_repeats(ids, 0.5, seed=1)
    assert torch.equal(repeated[2:], ids[2:])
    for row, original in zip(repeated[:2], ids[:2], strict=True):
        period = int((row == row[0]).nonzero()[1])
        assert 8 <= period < 32
        assert torch.equal(row, original[torch.arange(64) % period])
