"""Stop strings: decides where a stop string ends the text of a sequence, and which text a client may see before that.

The engine ends a request at the token that completes a stop string, and the REST layer cuts the text at the stop
string. Both ask `StopStrings`, so they find the same stop string, however steps divide the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.request import SequenceOutput
from cluster.tokenizer.tokenizer import IncrementalDetokenizer, TextTokenizer


@dataclass(frozen=True, slots=True)
class StopHit:
    """A completed stop string. It covers the characters `start` to `end - 1` of the text that `StopFinder` has read so
    far.
    """

    stop: str
    start: int
    end: int


class StopFinder:
    """Finds the first stop string that a growing text completes, wherever the text is split into pieces.

    The first stop string is the one that ends first. If two end at the same character, it is the longer of the two.
    Each stop string has its own Knuth-Morris-Pratt matcher, so a character costs constant amortised time per stop
    string, and no text is kept.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted((s for s in stops if s), key=len, reverse=True)
        self._prefix_functions = [_prefix_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop string: how many of its characters end the text read so far
        self._chars_read = 0

    def find(self, piece: str) -> StopHit | None:
        """Feed the next piece of text. Return a hit if the piece completes a stop string. Do not call `find` after a
        hit.
        """
        if not self._stops:
            self._chars_read += len(piece)
            return None
        for character in piece:
            self._chars_read += 1
            for index, stop in enumerate(self._stops):
                matched = self._matched[index]
                while matched and stop[matched] != character:
                    matched = self._prefix_functions[index][matched - 1]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    return StopHit(stop, self._chars_read - len(stop), self._chars_read)
                self._matched[index] = matched
        return None

    def skip(self, piece: str) -> None:
        """Read a piece of text in which stop strings are ignored."""
        self._chars_read += len(piece)

    @property
    def pending_chars(self) -> int:
        """The number of characters at the end of the text read so far that may begin a stop string."""
        return max(self._matched, default=0)


def _prefix_function(word: str) -> list[int]:
    """Return the Knuth-Morris-Pratt prefix function of `word`: for each prefix, the length of its longest proper prefix
    that is also its suffix.
    """
    lengths = [0] * len(word)
    length = 0
    for position in range(1, len(word)):
        while length and word[position] != word[length]:
            length = lengths[length - 1]
        if word[position] == word[length]:
            length += 1
        lengths[position] = length
    return lengths


class StopStrings:
    """Decides where a stop string ends a sequence: for the engine, and for the text that a client sees.

    Stop strings are ignored in the prompt and in the text of the first `min_tokens` tokens. `hit` is the stop string
    that ended the text, or None.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._finder = StopFinder(stops)
        self._min_tokens_left = min_tokens  # in the text of this many next tokens, stop strings are ignored
        self.hit: StopHit | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete. Do not call `push` after a hit."""
        text = ""
        if self._min_tokens_left:
            early_ids, token_ids = token_ids[: self._min_tokens_left], token_ids[self._min_tokens_left :]
            self.count_hidden_tokens(len(early_ids))
            text = self._detokenizer.push(early_ids)
            self._finder.skip(text)
        return text + self._find(self._detokenizer.push(token_ids))

    def count_hidden_tokens(self, count: int) -> None:
        """Count tokens toward `min_tokens` whose text is not searched, such as special tokens."""
        self._min_tokens_left = max(0, self._min_tokens_left - count)

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._find(self._detokenizer.finish())

    @property
    def pending_chars(self) -> int:
        """The number of characters at the end of the text so far that may begin a stop string."""
        return self._finder.pending_chars

    def _find(self, piece: str) -> str:
        self.hit = self._finder.find(piece)
        return piece


class StoppedText:
    """Returns the text of one sequence that a client may see: complete characters, and no part of a stop string."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        special_token_names: Mapping[int, str] | None = None,
    ) -> None:
        """`include_stop` shows the stop string or the stop token that ends the text. `special_token_names` maps special
        tokens to the names under which the text shows them; stop strings are searched in the text without these names.
        """
        self._stops = StopStrings(tokenizer, prompt_token_ids, stops, min_tokens)
        self._special_token_names = special_token_names or {}
        # Names of special tokens that were not sent yet, each with the number of text characters before it.
        self._pending_names: list[tuple[int, str]] = []
        self._include_stop = include_stop
        self._buffered_text = ""  # text held back, since a stop string may begin in it
        self.num_sent_chars = 0  # characters returned so far, without names of special tokens

    @property
    def hit(self) -> StopHit | None:
        """The stop string that ended the text, or None."""
        return self._stops.hit

    def visible_token_ids(self, output: SequenceOutput) -> tuple[int, ...]:
        """Return those tokens of `output` whose text is shown: all, but without a stop token that ends the request.
        With `include_stop`, the stop token is shown too.
        """
        stopped_by_token = output.finish_reason == "stop" and isinstance(output.stop_reason, int)
        return output.token_ids[:-1] if stopped_by_token and not self._include_stop else output.token_ids

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that can be shown after these tokens. It is empty once a stop string has ended the text."""
        if not self._special_token_names:
            return self._push(token_ids)
        text, run = "", list[int]()
        for token in token_ids:
            if token in self._special_token_names:
                text += self._push(run) if run else ""
                run = []
                if not self.hit:
                    self._pending_names.append(
                        (self.num_sent_chars + len(self._buffered_text), self._special_token_names[token])
                    )
                    text += self._insert_names("")
                self._stops.count_hidden_tokens(1)
            else:
                run.append(token)
        return text + (self._push(run) if run else "")

    def _push(self, token_ids: Sequence[int]) -> str:
        return "" if self.hit else self._release(self._stops.push(token_ids), is_last=False)

    def finish(self) -> str:
        """Return the rest of the text, held back until now because a stop string might have begun in it."""
        return "" if self.hit else self._release(self._stops.finish(), is_last=True)

    def _release(self, piece: str, is_last: bool) -> str:
        text = self._buffered_text + piece
        if self.hit:
            num_ready = (self.hit.end if self._include_stop else self.hit.start) - self.num_sent_chars
        else:
            num_ready = len(text) - (0 if is_last else self._stops.pending_chars)
        self._buffered_text = text[num_ready:]
        self.num_sent_chars += num_ready
        return self._insert_names(text[:num_ready]) if self._pending_names else text[:num_ready]

    def _insert_names(self, text: str) -> str:
        """Return `text` with the names of special tokens inserted that belong into it or directly after it.
        `num_sent_chars` must already count `text`.
        """
        start, result, position = self.num_sent_chars - len(text), "", 0
        while self._pending_names and self._pending_names[0][0] <= self.num_sent_chars:
            name_position, name = self._pending_names.pop(0)
            result += text[position : name_position - start] + name
            position = max(position, name_position - start)
        return result + text[position:]
