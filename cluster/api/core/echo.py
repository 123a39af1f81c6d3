"""A prompt as an answer repeats it: its text, and where in it each of its tokens begins."""

import codecs
from collections.abc import Iterable, Sequence

from cluster.tokenizer.tokenizer import TextTokenizer

SLACK = 16
"""How many characters beyond its own length a token is looked for: what a tokenizer's normalizer leaves out."""


def text_of(prompt: str | None, ids: Sequence[int], tokenizer: TextTokenizer | None) -> str:
    """The text of a prompt: that of the client as it came, or else (None) what its tokens say, without a character that
    they leave unfinished, since the output may go on with that.
    """
    if prompt is not None:
        return prompt
    return "" if tokenizer is None else tokenizer.settled(tokenizer.textual(ids))


def offsets(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Where each of `tokens`, which spell `text`, begins in it, in characters.

    A character that is split over tokens begins at its first. A token that is not in the text, as one that the
    tokenizer puts before it, has no length.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at, found = 0, []
    for raw in tokens:
        found.append(at)
        piece = decoder.decode(raw)
        if text.startswith(piece, at):
            at += len(piece)
        elif piece.startswith(" ") and text.startswith(piece[1:], at):  # a space that is only in the tokens
            at += len(piece) - 1
        elif (later := text.find(piece, at, at + len(piece) + SLACK)) > at:
            found[-1], at = later, later + len(piece)
    return found
