"""The request fields that adjust logits, named as by OpenAI, vLLM and SGLang."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field

from cluster.api.core.content import Strict, Text
from cluster.api.core.errors import ApiError, shown
from cluster.api.core.service import RequestLimits
from cluster.request import MOST, LogitAdjustments
from cluster.tokenizer.tokenizer import TextTokenizer

MOST_BIAS = 100  # the largest absolute value in logit_bias, as at OpenAI


def _biases(value: Any) -> Any:
    """Return `logit_bias` with integer keys, which JSON can only write as strings; stops at the first wrong entry."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must map token ids to numbers, got {shown(value)}")
    made = {}
    for name, bias in value.items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10):
            raise ValueError(f"must map token ids to numbers, got the id {shown(name)}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MOST_BIAS <= bias <= MOST_BIAS:
            raise ValueError(f"{name}: must be a number in [-{MOST_BIAS}, {MOST_BIAS}], got {shown(bias)}")
        made[int(name)] = float(bias)
    return made


Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


class PenaltyFields(Strict):
    """Penalties, biases and banned tokens; the default of each field means off."""

    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases, json_schema_input_type=dict[str, Bias])] = Field(
        default_factory=dict
    )
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(default_factory=list, min_length=1)
    bad_words: Annotated[list[Text], FailFast()] = Field(default_factory=list)
    min_tokens: int = Field(default=0, ge=0, lt=MOST)

    def check_adjustments(self, vocab_size: int, limits: RequestLimits) -> None:
        """Check what the types of these fields cannot express: token ids and limits.

        Raises:
            ApiError: 400 that names the field.
        """
        allowed = self.allowed_token_ids
        longest = max((len(word) for word in self.bad_words), default=0)
        checks = (
            (all(t < vocab_size for t in self.logit_bias), "logit_bias", f"ids must lie in [0, {vocab_size})"),
            (len(allowed) <= vocab_size, "allowed_token_ids", f"at most {vocab_size} ids"),
            (all(0 <= t < vocab_size for t in allowed), "allowed_token_ids", f"ids must lie in [0, {vocab_size})"),
            (len(self.bad_words) <= limits.bad_words, "bad_words", f"at most {limits.bad_words} words"),
            (longest <= limits.stop_characters, "bad_words", f"at most {limits.stop_characters} characters per word"),
            (all(word.strip() for word in self.bad_words), "bad_words", "an empty word cannot be banned; leave it out"),
        )
        for ok, name, message in checks:
            if not ok:
                raise ApiError(f"{name}: {message}", param=name, code="invalid_value")

    def adjustments(self, tokenizer: TextTokenizer | None, vocab_size: int) -> LogitAdjustments | None:
        """Return the requested adjustments, or None if there are none. A bad word is banned in two tokenizations: at
        the start of a text, and after a space. A tokenization with an id of `vocab_size` or more is skipped, because
        the model cannot generate it.
        """
        words = []
        for word in self.bad_words if tokenizer is not None else ():
            assert tokenizer is not None
            words += [tuple(tokenizer.encode(start + word.lstrip(), False)) for start in ("", " ")]
        made = LogitAdjustments(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            bias=tuple((token, bias) for token, bias in self.logit_bias.items() if bias),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids)) or None,
            bad_words_token_ids=tuple(dict.fromkeys(word for word in words if word and max(word) < vocab_size)),
            min_tokens=self.min_tokens,
        )
        return None if made == LogitAdjustments() else made
