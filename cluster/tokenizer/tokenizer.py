"""The tokenizer and incremental detokenization, without transformers; `cluster.api.core.tokenizer` renders chats."""

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from cluster.config import ConfigError

CONTEXT_TOKENS = 8  # tokens before the new ones that are decoded together with them
WINDOW_TOKENS = 64  # more tokens decoded together are cut to the last ones, even if they end inside a character


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet as a dict from character to byte. A printable byte has the character of the
    same number; the other bytes have the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def _decoder_types(node: Any) -> set[str]:
    """Return every `type` in a decoder's JSON, at any depth."""
    if isinstance(node, dict):
        own_types = {node["type"]} if isinstance(node.get("type"), str) else set()
        return own_types.union(*(_decoder_types(child) for child in node.values()))
    if isinstance(node, list):
        return set[str]().union(*(_decoder_types(child) for child in node))
    return set()


class TextTokenizer:
    """Converts text to token ids and back, by a `tokenizer.json`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        types = _decoder_types(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else set()
        self._byte_level = "ByteLevel" in types
        self._byte_fallback = "ByteFallback" in types
        names = [f"<0x{byte:02X}>" for byte in range(256)] if self._byte_fallback else []
        byte_tokens = [tokenizer.token_to_id(name) for name in names]
        self._byte_tokens = [token for token in byte_tokens if token is not None]  # indexed by byte if all 256 exist
        self._byte_of_token = {token: byte for byte, token in enumerate(byte_tokens) if token is not None}
        self._byte_cache: dict[int, bytes] = {}
        self._uses_metaspace = bool(types & {"ByteFallback", "Metaspace"})  # in token names U+2581 is a space

    @classmethod
    def load(cls, path: str) -> Self:
        """Return the tokenizer of `<path>/tokenizer.json`.

        Raises:
            ConfigError: the file is missing or cannot be read as a tokenizer.
        """
        file_path = Path(path) / "tokenizer.json"
        if not file_path.is_file():
            raise ConfigError(
                f"no tokenizer at {file_path}: set tokenizer_path to a folder that holds tokenizer.json (transformers "
                "writes one with AutoTokenizer.from_pretrained(...).save_pretrained(folder); of a tekken.json with "
                'save_pretrained(folder, save_format="hf"))'
            )
        try:
            return cls(Tokenizer.from_file(str(file_path)))
        except Exception as error:  # the Rust library raises plain Exception
            raise ConfigError(f"{file_path} is not a tokenizer this version can read: {error}") from error

    @property
    def special_tokens(self) -> dict[int, str]:
        """The names of the special tokens by id; `decode` leaves these tokens out."""
        return {token: str(self._tokenizer.id_to_token(token)) for token in self._special_ids}

    @property
    def has_exact_token_bytes(self) -> bool:
        """Whether the joined bytes of tokens, as `token_text` returns them, are the UTF-8 bytes of their text."""
        return self._byte_level or self._uses_metaspace

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The `tokenizers.Tokenizer` inside."""
        return self._tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. `add_special_tokens` adds the tokenizer's special tokens (often a BOS)."""
        # A batch of one, since `encode_batch_fast` releases the GIL and `encode` does not.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens and unknown ids; invalid UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(self._replace_invalid_utf8(ids), skip_special_tokens=True))

    def decode_without_gil(self, ids: Sequence[int]) -> str:
        """Return the same text as `decode`. It releases the GIL but has more overhead: use it for many ids."""
        (text,) = self._tokenizer.decode_batch([self._replace_invalid_utf8(ids)], skip_special_tokens=True)
        return str(text)

    def _replace_invalid_utf8(self, ids: Sequence[int]) -> list[int]:
        """Return the ids with invalid UTF-8 in byte tokens replaced by the byte tokens of U+FFFD.

        If one byte in a run of byte tokens is invalid, `tokenizers` decodes every byte of the run to U+FFFD. An answer
        that ends inside a character would then change complete characters that a stream has already sent.
        """
        if len(self._byte_tokens) < 256 or not any(token in self._byte_of_token for token in ids):
            return list(ids)
        result, run = list[int](), bytearray()
        for token in self.visible_token_ids(ids):  # tokens that `decode` leaves out do not end a run
            if token in self._byte_of_token:
                run.append(self._byte_of_token[token])
                continue
            result += [*self._byte_token_ids(run), token]
            run.clear()
        return [*result, *self._byte_token_ids(run)]

    def _byte_token_ids(self, run: bytearray) -> list[int]:
        return [self._byte_tokens[byte] for byte in run.decode("utf-8", "replace").encode()]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and the UTF-8 bytes of one token, as log-probabilities report them. Special tokens have a
        text and bytes too.

        A token that is only part of a character has U+FFFD in its text and its true bytes in the second value.
        """
        if self._byte_level or self._uses_metaspace:
            raw = self._token_bytes(token_id)
            return raw.decode("utf-8", "replace"), raw
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return text, text.encode()

    def visible_token_ids(self, ids: Iterable[int]) -> list[int]:
        """Return the ids without those that `decode` leaves out: special tokens and unknown ids."""
        return [i for i in ids if i not in self._special_ids and self._token_bytes(i)]

    def decode_complete(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, but leave out a last character that later tokens may still complete. `ids` must
        come from `visible_token_ids`.
        """
        pending = self._pending_bytes(ids)
        if pending and self._byte_fallback:
            return self.decode(ids[:-pending])  # each pending byte is one token
        text = self.decode(ids)
        return text[:-1] if pending else text  # the pending bytes are one U+FFFD

    def ends_within_character(self, ids: Sequence[int]) -> bool:
        """Return whether `ids` end in the middle of a UTF-8 sequence. `ids` must come from `visible_token_ids`."""
        return self._pending_bytes(ids) > 0

    def _pending_bytes(self, ids: Sequence[int]) -> int:
        """Return the number of bytes of the incomplete UTF-8 sequence at the end of `ids`, 0 to 3."""
        if not ids or not (self._byte_level or self._byte_fallback) or self._token_bytes(ids[-1])[-1:] < b"\x80":
            return 0
        # A UTF-8 sequence has at most 4 bytes and a token at least one, so the last 4 tokens hold its start.
        tail = b"".join(self._token_bytes(i) for i in ids[-4:])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return len(decoder.getstate()[0])

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, perhaps only part of a character; no bytes for an unknown id."""
        token_bytes = self._byte_cache.get(token_id)
        if token_bytes is None:
            token_bytes = self._byte_cache[token_id] = self._compute_token_bytes(token_id)
        return token_bytes

    def _compute_token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            if all(character in BYTE_OF_CHARACTER for character in token):
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes((int(token[3:5], 16),))
        return (token.replace("\u2581", " ") if self._uses_metaspace else token).encode()


class IncrementalDetokenizer:
    """Returns the text of a sequence as its tokens arrive, in complete characters.

    The joined results of `push` and `finish` are `decode(prompt + pushed)` without the prompt's text, for any division
    of the tokens into pushes. A character that the prompt's last token begins and the model completes belongs to the
    output. A push decodes only a bounded window: the new tokens and the tokens just before them.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        end = len(prompt_token_ids)
        # Special tokens give no context, so read the prompt backwards until enough other tokens are found.
        while end and len(self._window) < 2 * CONTEXT_TOKENS:
            start = max(0, end - 2 * CONTEXT_TOKENS)
            self._window[:0] = tokenizer.visible_token_ids(prompt_token_ids[start:end])
            end = start
        self._num_sent_chars = 0  # characters of the window's text that were returned before
        self._trim_window()

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; it may be empty."""
        new_ids = self._tokenizer.visible_token_ids(token_ids)
        if not new_ids:
            return ""
        self._window += new_ids
        text = self._tokenizer.decode_complete(self._window)
        piece = text[self._num_sent_chars :]
        self._num_sent_chars = max(self._num_sent_chars, len(text))
        if len(self._window) > 2 * CONTEXT_TOKENS:
            ends_complete = not self._tokenizer.ends_within_character(self._window)
            if ends_complete or len(self._window) > WINDOW_TOKENS:
                self._trim_window()
        return piece

    def finish(self) -> str:
        """Return the rest of the text. It is usually empty; a character that was never completed gives U+FFFD."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._num_sent_chars :]
        self._num_sent_chars = max(self._num_sent_chars, len(text))
        return piece

    def _trim_window(self) -> None:
        """Keep only the last `CONTEXT_TOKENS` tokens of the window, or up to 3 more so that it starts at a complete
        character. The text of the kept tokens counts as sent, except an incomplete last character.
        """
        max_removed = len(self._window) - CONTEXT_TOKENS
        if max_removed > 0:
            candidates = range(max_removed, max(0, max_removed - 4), -1)
            complete_starts = (
                start for start in candidates if not self._tokenizer.ends_within_character(self._window[:start])
            )
            del self._window[: next(complete_starts, max_removed)]
        self._num_sent_chars = len(self._tokenizer.decode_complete(self._window))
