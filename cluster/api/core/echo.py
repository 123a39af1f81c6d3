"""The prompt in an answer with `echo`: its text, and the offset of each of its tokens."""

import codecs
from collections.abc import Iterable, Sequence

from cluster.tokenizer.tokenizer import TextTokenizer

SLACK = 16
"""How many characters that the tokenizer's normalizer has removed are skipped, at most, to find the next token."""


def text_of(prompt: str | None, ids: Sequence[int], tokenizer: TextTokenizer | None) -> str:
    """Return the text of a prompt: `prompt` as the client sent it, or if that is None, the decoded `ids`. An incomplete
    character at the end of the decoded text is left out, because the output may complete it.
    """
    if prompt is not None:
        return prompt
    return "" if tokenizer is None else tokenizer.settled(tokenizer.textual(ids))


def offsets(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Return where each token begins in `text`, in characters; `tokens` are the bytes of the tokens of the text.

    If a character is split over several tokens, all of them have the offset of the character. A token that is not in
    the text, such as a special token that the tokenizer adds, has length 0.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at, found = 0, []
    for raw in tokens:
        found.append(at)
        piece = decoder.decode(raw)
        if text.startswith(piece, at):
            at += len(piece)
        elif piece.startswith(" ") and text.startswith(piece[1:], at):  # the tokenizer added a space before the text
            at += len(piece) - 1
        elif (later := text.find(piece, at, at + len(piece) + SLACK)) > at:  # the normalizer removed characters
            found[-1], at = later, later + len(piece)
    return found
