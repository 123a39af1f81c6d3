"""What `LLM.generate` and `LLM.chat` return, in the names of vLLM."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.api.core.choices import Delta, OutputSequence, joined
from cluster.api.openai.answers import AnswerShape, ranked
from cluster.request import SequenceOutput as StepOutput
from cluster.request import TokenLogprob
from cluster.tokenizer.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class Logprob(NamedTuple):
    """The natural logarithm of a token's probability under the target's raw logits.

    `rank` is the token's place among all tokens, 1 for the likeliest; None where it is unknown. `decoded_token` is its
    text, None for a model without a tokenizer.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    `text` ends before the stop string or the token that ended the answer, and has no special tokens; it is empty for a
    model without a tokenizer. `token_ids` are all tokens that were generated. `finish_reason` is "stop", "length",
    "tool_calls" (of a chat) or "error"; `stop_reason` is the stop string or the id of the token that ended the answer.
    `logprobs` have, for each token, its own and those of the likeliest tokens in its place, by token id.
    `accept_length` is the mean number of tokens that a step of speculation gave; it is 1.0 where nothing was drafted.

    Of a chat, `message` is the assistant's message as /v1/chat/completions answers it, with `tool_calls` and
    `reasoning_content` where there are any, and `text` is its content. `error` says why an answer with the
    finish_reason "error" ended early; what came before the error is kept.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    accept_length: float = 1.0
    message: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt: `outputs` has `n` of them.

    `prompt` is its text; None where token ids or a conversation were given. `prompt_logprobs` have None for the first
    token, which has nothing before it. `num_cached_tokens` of the prompt's tokens were read from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text


class GrowingAnswer:
    """The answers to one prompt while they grow. `choices` are its sequences, in the order of their index."""

    def __init__(self, prompt: str | None, choices: Sequence[OutputSequence], shape: AnswerShape) -> None:
        """`shape` writes the answer as the REST API does."""
        self.choices, self._prompt, self._shape = choices, prompt, shape
        self._deltas: list[list[Delta]] = [[] for _ in choices]
        self._errors: dict[int, str] = {}

    @property
    def ended(self) -> bool:
        """Whether all sequences have ended."""
        return all(choice.finished or choice.index in self._errors for choice in self.choices)

    def take(self, choice: OutputSequence, output: StepOutput) -> None:
        """Add what a step gave to one of the sequences. One that failed keeps what it has; the log says why."""
        if output.error is not None:
            logger.warning("%s", output.error)
            self._errors[choice.index] = output.error
        else:
            self._deltas[choice.index].append(choice.take(output))

    def output(self, tokenizer: TextTokenizer | None) -> RequestOutput:
        """The answers as a whole, once all sequences have ended."""
        body = self._shape.body([delta for deltas in self._deltas for delta in deltas])
        whole = [joined(index, deltas) for index, deltas in enumerate(self._deltas)]
        first = self.choices[0]
        scores: list[dict[int, Logprob] | None] | None = None
        if (most := first.request.params.prompt_logprobs) is not None:
            scores = [None, *(_logprobs(entry, most, tokenizer) for entry in whole[0].prompt_logprobs)]
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=list(first.request.prompt_token_ids),
            outputs=[self._completion(delta, body["choices"][delta.index], tokenizer) for delta in whole],
            prompt_logprobs=scores,
            num_cached_tokens=first.cached_tokens,
        )

    def _completion(
        self, delta: Delta, written: Mapping[str, Any], tokenizer: TextTokenizer | None
    ) -> CompletionOutput:
        """One answer; `written` is its entry among the choices of the REST API's answer."""
        choice, message = self.choices[delta.index], written.get("message")
        counts, most, error = choice.speculation, choice.request.params.logprobs, self._errors.get(delta.index)
        return CompletionOutput(
            index=delta.index,
            text=written["text"] if message is None else message["content"] or "",
            token_ids=list(delta.token_ids),
            finish_reason="error" if error is not None else written["finish_reason"],
            stop_reason=delta.stop_reason,
            logprobs=None if most is None else [_logprobs(entry, most, tokenizer) for entry in delta.logprobs],
            cumulative_logprob=None if most is None else sum(entry.logprob for entry in delta.logprobs),
            accept_length=counts.accept_length if counts else 1.0,
            message=message,
            error=error,
        )


def _logprobs(entry: TokenLogprob, most: int, tokenizer: TextTokenizer | None) -> dict[int, Logprob]:
    """A token and the `most` likeliest ones in its place, by id."""
    return {
        token: Logprob(logprob, rank or None, None if tokenizer is None else tokenizer.token_text(token)[0])
        for token, (logprob, rank) in ranked(entry, most).items()
    }
