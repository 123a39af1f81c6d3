"""Text and tokens: a tokenizer folder, detokenization step by step, and stop strings.

The engine ends a request at the token that completes a stop string, the REST layer cuts the text there; both read this
file, so they agree to the character, however the tokens were split into steps. No transformers here: chat templates
live in `cluster.api.core.tokenizer`.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from cluster.config import ConfigError

CONTEXT_TOKENS = 8  # tokens before the new ones that a decode starts from
WINDOW_TOKENS = 64  # a window is cut at this length even if it does not end on a whole character


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the rest for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTE_OF_CHARACTER = _byte_of_character()


def _decoder_types(node: Any) -> set[str]:
    """Every `type` named in a decoder's JSON, at any depth."""
    if isinstance(node, dict):
        own = {node["type"]} if isinstance(node.get("type"), str) else set()
        return own.union(*(_decoder_types(child) for child in node.values()))
    if isinstance(node, list):
        return set[str]().union(*(_decoder_types(child) for child in node))
    return set()


class TextTokenizer:
    """Text to token ids and back, from a `tokenizer.json`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        types = _decoder_types(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else set()
        self._byte_level = "ByteLevel" in types
        self._byte_fallback = "ByteFallback" in types
        names = [f"<0x{byte:02X}>" for byte in range(256)] if self._byte_fallback else []
        byte_tokens = [tokenizer.token_to_id(name) for name in names]
        self._byte_tokens = [token for token in byte_tokens if token is not None]  # by byte, where all are there
        self._byte_of = {token: byte for byte, token in enumerate(byte_tokens) if token is not None}
        self._byte_cache: dict[int, bytes] = {}
        self._spaced = bool(types & {"ByteFallback", "Metaspace"})  # a space is written U+2581

    @classmethod
    def load(cls, path: str) -> Self:
        """Read `<path>/tokenizer.json`.

        Raises:
            ConfigError: the file is missing or is not a tokenizer.
        """
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"no tokenizer at {file}: set tokenizer_path to a folder that holds tokenizer.json (transformers "
                "writes one with AutoTokenizer.from_pretrained(...).save_pretrained(folder); of a tekken.json with "
                'save_pretrained(folder, save_format="hf"))'
            )
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the Rust library raises plain Exception
            raise ConfigError(f"{file} is not a tokenizer this version can read: {error}") from error

    @property
    def special(self) -> dict[int, str]:
        """The special tokens, which `decode` leaves out, by their ids."""
        return {token: str(self._tokenizer.id_to_token(token)) for token in self._special}

    @property
    def byte_wise(self) -> bool:
        """Whether a text is the bytes of its tokens, one after the other; `token_text` has them."""
        return self._byte_level or self._spaced

    @property
    def library(self) -> Tokenizer:
        """The tokenizer itself."""
        return self._tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the tokenizer puts around a text (often a BOS)."""
        # A batch of one: unlike `encode`, it releases the GIL meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids. Special tokens and ids outside the vocabulary are left out; bytes that are no UTF-8
        become U+FFFD.
        """
        return str(self._tokenizer.decode(self._sound(ids), skip_special_tokens=True))

    def decode_freely(self, ids: Sequence[int]) -> str:
        """Like `decode`, but it releases the GIL meanwhile and costs more: for many ids."""
        (text,) = self._tokenizer.decode_batch([self._sound(ids)], skip_special_tokens=True)
        return str(text)

    def _sound(self, ids: Sequence[int]) -> list[int]:
        """The ids, in which byte tokens that are no UTF-8 have been replaced by those of U+FFFD.

        Of a run of byte tokens with one fault `tokenizers` decodes every byte to U+FFFD. So whole characters that a
        stream has sent already would be taken back when an answer ends within the next one.
        """
        if len(self._byte_tokens) < 256 or not any(token in self._byte_of for token in ids):
            return list(ids)
        found, run = list[int](), bytearray()
        for token in self.textual(ids):  # what is left out does not end a run
            if token in self._byte_of:
                run.append(self._byte_of[token])
                continue
            found += [*self._tokens_of(run), token]
            run.clear()
        return [*found, *self._tokens_of(run)]

    def _tokens_of(self, run: bytearray) -> list[int]:
        return [self._byte_tokens[byte] for byte in run.decode("utf-8", "replace").encode()]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, special tokens included, as logprobs report it: its text and its UTF-8 bytes.

        A token that is a part of a character has U+FFFD in its text and the true bytes beside it.
        """
        if self._byte_level or self._spaced:
            raw = self._bytes(token_id)
            return raw.decode("utf-8", "replace"), raw
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return text, text.encode()

    def textual(self, ids: Iterable[int]) -> list[int]:
        """The ids that `decode` does not leave out."""
        return [i for i in ids if i not in self._special and self._bytes(i)]

    def settled(self, ids: Sequence[int]) -> str:
        """The text of `textual` ids without an unfinished character at the end, which later tokens may complete."""
        pending = self._pending_bytes(ids)
        if pending and self._byte_fallback:
            return self.decode(ids[:-pending])  # there a byte is a token
        text = self.decode(ids)
        return text[:-1] if pending else text

    def ends_within_character(self, ids: Sequence[int]) -> bool:
        """Whether the last of `textual` ids leaves a UTF-8 sequence unfinished."""
        return self._pending_bytes(ids) > 0

    def _pending_bytes(self, ids: Sequence[int]) -> int:
        """Length of the unfinished UTF-8 sequence at the end of `ids`, 0 to 3."""
        if not ids or not (self._byte_level or self._byte_fallback) or self._bytes(ids[-1])[-1:] < b"\x80":
            return 0
        # A sequence has at most 4 bytes and a token at least one; where it starts is seen in the bytes themselves.
        tail = b"".join(self._bytes(i) for i in ids[-4:])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return len(decoder.getstate()[0])

    def _bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, a part of a character too; nothing for an id outside the vocabulary."""
        found = self._byte_cache.get(token_id)
        if found is None:
            found = self._byte_cache[token_id] = self._look_up_bytes(token_id)
        return found

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            if all(character in BYTE_OF_CHARACTER for character in token):
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes((int(token[3:5], 16),))
        return (token.replace("\u2581", " ") if self._spaced else token).encode()


class IncrementalDetokenizer:
    """The text of a sequence as its tokens come, in whole characters.

    Joined, what `push` and `finish` return is `decode(prompt + pushed)` without the prompt's own text, however the
    tokens were split. A character begun by the prompt's last token and finished by the model belongs to the output.
    A push costs the new tokens and a few before them, never the whole text.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        at = len(prompt_token_ids)
        while at and len(self._window) < 2 * CONTEXT_TOKENS:  # special tokens give no context, so look behind them
            start = max(0, at - 2 * CONTEXT_TOKENS)
            self._window[:0] = tokenizer.textual(prompt_token_ids[start:at])
            at = start
        self._sent = 0
        self._cut()

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        new = self._tokenizer.textual(token_ids)
        if not new:
            return ""
        self._window += new
        text = self._tokenizer.settled(self._window)
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        if len(self._window) > 2 * CONTEXT_TOKENS:
            whole = not self._tokenizer.ends_within_character(self._window)
            if whole or len(self._window) > WINDOW_TOKENS:
                self._cut()
        return piece

    def finish(self) -> str:
        """What is left at the end: usually nothing, or U+FFFD for a character that was never finished."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece

    def _cut(self) -> None:
        """Keep the last few tokens, from the start of a character; their finished text counts as sent."""
        most = len(self._window) - CONTEXT_TOKENS
        if most > 0:
            starts = range(most, max(0, most - 4), -1)
            whole = (at for at in starts if not self._tokenizer.ends_within_character(self._window[:at]))
            del self._window[: next(whole, most)]
        self._sent = len(self._tokenizer.settled(self._window))


@dataclass(frozen=True, slots=True)
class StopHit:
    """A completed stop string; `start` and `end` are characters from the beginning of the fed text."""

    stop: str
    start: int
    end: int


class StopFinder:
    """Finds the first stop string that a growing text completes, wherever the pieces are split.

    First is the one that ends first; of two that end together, the longer. Each stop string has one matcher (Knuth,
    Morris, Pratt), so a character costs a constant per stop string and no text is kept.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted((s for s in stops if s), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._fed = 0

    def find(self, piece: str) -> StopHit | None:
        """Feed the next piece; returns the hit if it completes a stop string. Nothing may be fed after a hit."""
        if not self._stops:
            self._fed += len(piece)
            return None
        for character in piece:
            self._fed += 1
            for which, stop in enumerate(self._stops):
                matched = self._matched[which]
                while matched and stop[matched] != character:
                    matched = self._borders[which][matched - 1]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    return StopHit(stop, self._fed - len(stop), self._fed)
                self._matched[which] = matched
        return None

    def skip(self, piece: str) -> None:
        """Pass over text in which no stop string counts."""
        self._fed += len(piece)

    @property
    def held(self) -> int:
        """How many of the last characters fed may be the beginning of a stop string."""
        return max(self._matched, default=0)


def _borders(word: str) -> list[int]:
    """For every prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for at in range(1, len(word)):
        while length and word[at] != word[length]:
            length = borders[length - 1]
        if word[at] == word[length]:
            length += 1
        borders[at] = length
    return borders


class StoppedText:
    """The text of one sequence as a client may see it: whole characters, and never a part of a stop string."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """In the text of the first `min_tokens` tokens no stop string counts. `shown` are special tokens that stand in
        the text by these names; stop strings are looked for in the text without them.
        """
        self._skipped = min_tokens
        self._shown = shown or {}
        self._names: list[tuple[int, str]] = []  # of special tokens not sent yet, with the characters before them
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._finder = StopFinder(stops)
        self._include_stop = include_stop
        self._waiting = ""
        self.hit: StopHit | None = None
        self.sent = 0  # characters returned so far

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make safe to show; empty after a stop string."""
        if not self._shown:
            return self._push(token_ids)
        text, run = "", list[int]()
        for token in token_ids:
            if token in self._shown:
                text += self._push(run) if run else ""
                run = []
                if not self.hit:
                    self._names.append((self.sent + len(self._waiting), self._shown[token]))
                    text += self._named("")
                self._skipped = max(0, self._skipped - 1)
            else:
                run.append(token)
        return text + (self._push(run) if run else "")

    def _push(self, token_ids: Iterable[int]) -> str:
        if self.hit:
            return ""
        ids = list(token_ids)
        early, self._skipped = ids[: self._skipped], max(0, self._skipped - len(ids))
        skipped = self._detokenizer.push(early) if early else ""
        self._finder.skip(skipped)
        return self._release(skipped, self._detokenizer.push(ids[len(early) :]), last=False)

    def finish(self) -> str:
        """The rest, held back until now because a stop string might have begun there."""
        return "" if self.hit else self._release("", self._detokenizer.finish(), last=True)

    def _release(self, skipped: str, piece: str, last: bool) -> str:
        self.hit = self._finder.find(piece)
        text = self._waiting + skipped + piece
        if self.hit:
            ready = (self.hit.end if self._include_stop else self.hit.start) - self.sent
        else:
            ready = len(text) - (0 if last else self._finder.held)
        self._waiting = text[ready:]
        self.sent += ready
        return self._named(text[:ready]) if self._names else text[:ready]

    def _named(self, text: str) -> str:
        """A text that was just sent, with the names of the special tokens in it."""
        begin, found, at = self.sent - len(text), "", 0
        while self._names and self._names[0][0] <= self.sent:
            place, name = self._names.pop(0)
            found += text[at : place - begin] + name
            at = max(at, place - begin)
        return found + text[at:]
