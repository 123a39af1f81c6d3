"""The output classes of `LLM.generate` and `LLM.chat`, with vLLM's names."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.api.core.adapter import AnswerFormatter
from cluster.api.core.sequences import Delta, OutputSequence, join_deltas
from cluster.api.openai.answers import ranked_logprobs
from cluster.request import SequenceOutput as StepOutput
from cluster.request import TokenLogprob
from cluster.tokenizer.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class Logprob(NamedTuple):
    """The natural-log probability of a token under the target's raw logits.

    `rank` is the token's rank by probability, 1 for the likeliest, or None if unknown. `decoded_token` is the token's
    text, or None for a model without a tokenizer.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    `text` excludes all special tokens and, unless `include_stop_str_in_output` is set, the stop string or stop token
    that ended the answer. It is empty for a model without a tokenizer. `token_ids` are all generated tokens.
    `finish_reason` is "stop", "length", "tool_calls" (chat only) or "error". `stop_reason` is the stop string or the id
    of the token that ended the answer, otherwise None. `logprobs` has one dict per token. Its keys are the ids of
    the token itself and of the likeliest alternatives. `logprobs` and `cumulative_logprob` are None unless asked for.
    `accept_length` is the mean number of tokens per speculative step, or 1.0 if nothing was drafted.

    For a chat, `message` is the assistant message as in /v1/chat/completions, with `tool_calls` and `reasoning_content`
    if present, and `text` is its content. If `finish_reason` is "error", `error` is the cause, and everything generated
    before the error is kept.
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
    """All answers to one prompt: `outputs` has `n` items, as many as the parameter `n` asks for.

    `prompt` is the prompt's text, or None if token ids or a conversation were given. `prompt_logprobs` is None unless
    asked for; its first item is None, because the first token has no context. `num_cached_tokens` counts the prompt
    tokens read from the prefix cache.
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


class PendingAnswer:
    """The answers to one prompt while they are generated. `choices` are its sequences, ordered by index."""

    def __init__(self, prompt: str | None, choices: Sequence[OutputSequence], formatter: AnswerFormatter) -> None:
        """`formatter` formats the answer as the REST API does. `prompt` is the prompt's text; None if it has none."""
        self.choices, self._prompt, self._formatter = choices, prompt, formatter
        self._deltas: list[list[Delta]] = [[] for _ in choices]
        self._errors: dict[int, str] = {}

    @property
    def is_finished(self) -> bool:
        """Whether all sequences have finished or failed."""
        return all(choice.finished or choice.index in self._errors for choice in self.choices)

    def add_output(self, choice: OutputSequence, output: StepOutput) -> None:
        """Add a step's output to one of the sequences. A failed sequence keeps its tokens; the error is logged."""
        if output.error is not None:
            logger.warning("%s", output.error)
            self._errors[choice.index] = output.error
        else:
            self._deltas[choice.index].append(choice.process_output(output))

    def output(self, tokenizer: TextTokenizer | None) -> RequestOutput:
        """Return the complete answers; call it when `is_finished` is true."""
        body = self._formatter.body([delta for deltas in self._deltas for delta in deltas])
        joined_deltas = [join_deltas(index, deltas) for index, deltas in enumerate(self._deltas)]
        first_choice = self.choices[0]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if (num_alternatives := first_choice.request.params.prompt_logprobs) is not None:
            prompt_logprobs = [
                None,
                *(_logprobs(entry, num_alternatives, tokenizer) for entry in joined_deltas[0].prompt_logprobs),
            ]
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=list(first_choice.request.prompt_token_ids),
            outputs=[self._completion(delta, body["choices"][delta.index], tokenizer) for delta in joined_deltas],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first_choice.cached_tokens,
        )

    def _completion(
        self, delta: Delta, rest_choice: Mapping[str, Any], tokenizer: TextTokenizer | None
    ) -> CompletionOutput:
        """Return one answer. `rest_choice` is the same answer as an item of `choices` in the REST answer's body."""
        choice, message = self.choices[delta.index], rest_choice.get("message")
        speculation, num_alternatives, error = (
            choice.speculation,
            choice.request.params.logprobs,
            self._errors.get(delta.index),
        )
        return CompletionOutput(
            index=delta.index,
            text=rest_choice["text"] if message is None else message["content"] or "",
            token_ids=list(delta.token_ids),
            finish_reason="error" if error is not None else rest_choice["finish_reason"],
            stop_reason=delta.stop_reason,
            logprobs=None
            if num_alternatives is None
            else [_logprobs(entry, num_alternatives, tokenizer) for entry in delta.logprobs],
            cumulative_logprob=None if num_alternatives is None else sum(entry.logprob for entry in delta.logprobs),
            accept_length=speculation.accept_length if speculation else 1.0,
            message=message,
            error=error,
        )


def _logprobs(entry: TokenLogprob, num_alternatives: int, tokenizer: TextTokenizer | None) -> dict[int, Logprob]:
    """Return the log-probabilities of a token and of the `num_alternatives` likeliest alternatives, by token id."""
    return {
        token: Logprob(logprob, rank or None, None if tokenizer is None else tokenizer.token_text(token)[0])
        for token, (logprob, rank) in ranked_logprobs(entry, num_alternatives).items()
    }
