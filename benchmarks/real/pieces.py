"""Detokenisation of every script: pieces joined, as a stream sends them, against the text of the whole."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.real.answers import tokenizer_of
from benchmarks.real.comparison import INVALID
from benchmarks.real.prompts import Prompt
from cluster.tokenizer.tokenizer import IncrementalDetokenizer, TextTokenizer

STEP = 4  # tokens that a step gives at most
WIDTH = 48  # tokens of a random text
SHOWN = 5


def joined(tokenizer: TextTokenizer, prompt: Sequence[int], answer: Sequence[int], dice: random.Random) -> str:
    """The text of an answer as a stream sends it, in steps of random sizes."""
    detokenizer, pieces, at = IncrementalDetokenizer(tokenizer, prompt), list[str](), 0
    while at < len(answer):
        size = dice.randint(1, STEP)
        pieces.append(detokenizer.push(answer[at : at + size]))
        at += size
    return "".join([*pieces, detokenizer.finish()])


def checked(folder: str, prompts: Sequence[Prompt], vocab_size: int | None = None) -> dict[str, Any]:
    """Compare, for the ids of every prompt and for random texts that hold every id of the vocabulary, the joined pieces
    with the decode of the whole, and that with the decode of `transformers` where all bytes are UTF-8. JSON-ready.
    """
    tokenizer, theirs = TextTokenizer.load(folder), tokenizer_of(folder)
    dice = random.Random(0)
    texts, other_pieces, other_decode = 0, list[list[int]](), list[list[int]]()
    for ids in _texts(theirs, prompts, vocab_size or len(theirs), dice):
        whole = tokenizer.decode(ids)
        texts += 1
        if joined(tokenizer, [], ids, dice) != whole:
            other_pieces.append(ids)
        right = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if INVALID not in right and right != whole:
            other_decode.append(ids)
    return {
        "texts": texts,
        "vocab_size": vocab_size or len(theirs),
        "other_pieces": len(other_pieces),
        "other_decode": len(other_decode),
        "examples": [*other_pieces[:SHOWN], *other_decode[:SHOWN]],
    }


def _texts(theirs: Any, prompts: Sequence[Prompt], vocab_size: int, dice: random.Random) -> Iterator[list[int]]:
    yield from (prompt.token_ids(theirs) for prompt in prompts)
    every = list(range(vocab_size))
    dice.shuffle(every)
    yield from (every[at : at + WIDTH] for at in range(0, vocab_size, WIDTH))
