"""Check detokenisation in every script: the joined pieces of a stream must equal the text of all tokens together."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.real.answers import tokenizer_of
from benchmarks.real.comparison import REPLACEMENT_CHARACTER
from benchmarks.real.prompts import Prompt
from cluster.tokenizer.tokenizer import IncrementalDetokenizer, TextTokenizer

STEP = 4  # most tokens of a step
WIDTH = 48  # tokens of a random text
SHOWN = 5  # examples to show of each kind


def stream_text(tokenizer: TextTokenizer, prompt: Sequence[int], answer: Sequence[int], rng: random.Random) -> str:
    """Return the text of an answer as a stream sends it, in steps of random sizes."""
    detokenizer, pieces, position = IncrementalDetokenizer(tokenizer, prompt), list[str](), 0
    while position < len(answer):
        size = rng.randint(1, STEP)
        pieces.append(detokenizer.push(answer[position : position + size]))
        position += size
    return "".join([*pieces, detokenizer.finish()])


def check_pieces(folder: str, prompts: Sequence[Prompt], vocab_size: int | None = None) -> dict[str, Any]:
    """Compare the joined pieces with the text of all tokens together and, if all bytes are valid UTF-8, that text with
    the text by `transformers`. The texts are the prompts and random texts that contain every id of the vocabulary.
    Return JSON-ready counts and examples.
    """
    tokenizer, reference_tokenizer = TextTokenizer.load(folder), tokenizer_of(folder)
    rng = random.Random(0)
    texts, other_pieces, other_decode = 0, list[list[int]](), list[list[int]]()
    for ids in _texts(reference_tokenizer, prompts, vocab_size or len(reference_tokenizer), rng):
        decoded = tokenizer.decode(ids)
        texts += 1
        if stream_text(tokenizer, [], ids, rng) != decoded:
            other_pieces.append(ids)
        expected = reference_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if REPLACEMENT_CHARACTER not in expected and expected != decoded:
            other_decode.append(ids)
    return {
        "texts": texts,
        "vocab_size": vocab_size or len(reference_tokenizer),
        "other_pieces": len(other_pieces),
        "other_decode": len(other_decode),
        "examples": [*other_pieces[:SHOWN], *other_decode[:SHOWN]],
    }


def _texts(
    reference_tokenizer: Any, prompts: Sequence[Prompt], vocab_size: int, rng: random.Random
) -> Iterator[list[int]]:
    yield from (prompt.token_ids(reference_tokenizer) for prompt in prompts)
    all_ids = list(range(vocab_size))
    rng.shuffle(all_ids)
    yield from (all_ids[start : start + WIDTH] for start in range(0, vocab_size, WIDTH))
