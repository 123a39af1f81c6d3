"""The token ids of the whole corpus as one array, and the windows of it that each training step reads."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cluster.train.corpus import chat_examples, heldout_files, texts, train_files

TokenIds = NDArray[np.int64]

CHAT_COUNT = 1500


def _concatenate(documents: list[list[int]], end_of_text: int) -> TokenIds:
    """Concatenate documents, with the end-of-text id before each."""
    return np.concatenate([np.asarray([end_of_text, *document], dtype=np.int64) for document in documents])


def _encode(tokenizer: PreTrainedTokenizerBase, documents: Iterator[str]) -> list[list[int]]:
    encoded: list[list[int]] = tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"]
    return encoded


def chat_documents(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> list[list[int]]:
    """Return up to `count` chats as token ids, formatted by the tokenizer's chat template."""
    documents: list[list[int]] = []
    for example in chat_examples(train_files(), count, seed):
        messages = [{"role": "user", "content": example.question}, {"role": "assistant", "content": example.answer}]
        chat_text = tokenizer.apply_chat_template(messages, tokenize=False)
        documents.append(tokenizer.encode(str(chat_text), add_special_tokens=False))
    return documents


def _cache_key(tokenizer: PreTrainedTokenizerBase, files: int | None) -> str:
    """Return a digest of the tokenizer, its chat template and the number of files, on which the ids depend."""
    facts = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def encode_corpus(
    tokenizer: PreTrainedTokenizerBase, cache: Path, *, files: int | None = None
) -> tuple[TokenIds, TokenIds]:
    """Return (train ids, held-out ids). They are read from the file `cache` if it was written for the same tokenizer
    and `files`; otherwise they are computed and written to it. `files` is the maximum number of train files, and of
    held-out files, to read; None reads all.
    """
    key = _cache_key(tokenizer, files)
    if cache.exists():
        with np.load(cache) as cached:
            if cached.get("key") == key:
                return cached["train"], cached["heldout"]
    end_of_text = int(tokenizer.convert_tokens_to_ids("<|endoftext|>"))  # type: ignore[arg-type]
    paths = train_files() if files is None else train_files()[:files]
    documents = _encode(tokenizer, texts(paths))
    documents += chat_documents(tokenizer, CHAT_COUNT if files is None else 8)
    document_order = np.random.default_rng(0).permutation(len(documents))
    train = _concatenate([documents[int(index)] for index in document_order], end_of_text)
    heldout = _concatenate(_encode(tokenizer, texts(heldout_files()[:files])), end_of_text)
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez(cache, key=key, train=train, heldout=heldout)
    return train, heldout


class Windows:
    """Batches of windows (runs of token ids) of the corpus. Step s always reads the same windows, so training can
    resume at any step.

    Every epoch shifts the window boundaries by a random offset and shuffles the windows.
    """

    def __init__(self, ids: TokenIds, length: int, batch: int, seed: int) -> None:
        self.ids = torch.from_numpy(ids)
        self.length = length
        self.batch = batch
        self.seed = seed
        self.per_epoch = (len(ids) - length) // length
        if self.per_epoch < 1:
            raise ValueError(f"{len(ids)} token ids are too few for windows of {length}")
        self._epoch_orders: dict[int, tuple[int, TokenIds]] = {}

    def _epoch_order(self, epoch: int) -> tuple[int, TokenIds]:
        if epoch not in self._epoch_orders:
            rng = np.random.default_rng((self.seed, epoch))
            self._epoch_orders[epoch] = int(rng.integers(self.length)), rng.permutation(self.per_epoch)
        return self._epoch_orders[epoch]

    def __call__(self, step: int) -> torch.Tensor:
        """Return the token ids [batch, length] of one step."""
        windows: list[torch.Tensor] = []
        for index in range(step * self.batch, (step + 1) * self.batch):
            offset, window_order = self._epoch_order(index // self.per_epoch)
            start = offset + int(window_order[index % self.per_epoch]) * self.length
            windows.append(self.ids[start : start + self.length])
        return torch.stack(windows)


def shuffled_rows(step: int, count: int, batch: int, seed: int) -> torch.Tensor:
    """Return the indices [batch] of the rows, out of `count`, that a step reads. Each epoch shuffles the rows anew."""
    epoch, index = divmod(step, max(1, count // batch))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[index * batch : (index + 1) * batch]


def with_repeats(ids: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Return a copy of the batch [B, T] in which the first rows, a `share` of all, repeat their own beginning.

    Each row has its own random period, so looking back a fixed distance does not help: to predict the repeated part,
    attention must find the earlier copy by its content. A small share of repeating rows early in training teaches a
    small model to copy much sooner than plain text does.
    """
    generator = torch.Generator().manual_seed(seed)
    out = ids.clone()
    length = ids.shape[1]
    for row in range(int(len(ids) * share)):
        period = int(torch.randint(length // 8, length // 2, (1,), generator=generator))
        out[row] = ids[row, torch.arange(length) % period]
    return out
