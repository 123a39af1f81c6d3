"""`LLM`: offline inference in the caller's process, as in vLLM: `LLM("DIR", draft="DIR").generate([...])`.

Each prompt becomes the body of a REST request, and the code of the REST routes parses that body. So a server would give
the same answer.
"""

import logging
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self

from cluster.api.core.adapter import GenerateCall, RequestReader
from cluster.api.core.errors import ApiError
from cluster.api.core.fields import WARNING_HEADER
from cluster.api.openai.answers import read_chat, read_completion
from cluster.chat.formats.choose import canonical_parser_names
from cluster.config import ConfigError
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.offline.arguments import (
    Params,
    Prompt,
    PromptLocation,
    config_of,
    conversations_of,
    params_for,
    prompts_of,
)
from cluster.offline.interrupts import defer_interrupt
from cluster.offline.local_model import LocalModel, SamplingDefaults
from cluster.offline.outputs import PendingAnswer, RequestOutput
from cluster.offline.progress import Progress
from cluster.offline.stepping import steps
from cluster.request import SequenceOutput as StepOutput
from cluster.status import RankInfo

logger = logging.getLogger(__name__)

Steps = Generator[tuple[StepOutput, ...], None, None]
# The engine holds at most this number times `max_running_requests` sequences, running and waiting. That is enough to
# fill each place that gets free.
MAX_SUBMITTED_PER_SLOT = 2


class LLM:
    """A loaded model. As a context manager, it frees the model on exit. Calls from several threads run one after
    another.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        draft: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        sampling_defaults: SamplingDefaults = "model",
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        **settings: Any,
    ) -> None:
        """Load a model. `model` and `draft` are folders of safetensors or names on a hub. Without a draft
        there is no speculation, unless `speculative_algorithm` is NGRAM.

        `settings` are engine settings of docs/settings.md, such as `dtype` or `context_length`, in SGLang's or vLLM's
        names. `sampling_defaults`, `tool_call_parser` and `reasoning_parser` are application settings of the same page.

        Raises:
            ConfigError: a model cannot be found or served, or a setting cannot be honoured; the message names the
                setting and says what to write instead.
        """
        if sampling_defaults not in ("model", "openai"):
            raise ConfigError(f"sampling_defaults must be 'model' or 'openai', got {sampling_defaults!r}")
        parsers = canonical_parser_names(tool_call_parser, reasoning_parser)
        self._lock = threading.Lock()
        self._closed_message = ""  # the error message of calls after close() or a failed step
        self._engine: Engine | None = build_engine(config_of(model, draft, tokenizer, settings))
        self._model = LocalModel(self._engine, parsers, sampling_defaults)
        self._finalizer = weakref.finalize(self, self._model.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts and return one output per prompt, in order. The prompts run as one batch.

        A prompt is a text, a list of token ids, or vLLM's `{"prompt": ...}` or `{"prompt_token_ids": ...}`. `prompts`
        is one prompt or a list. `sampling_params` is one value for all prompts, or a list with one value per prompt.
        `use_tqdm` draws a progress bar. Ctrl-C ends the batch with KeyboardInterrupt after the current step; this
        object can be used again. If the engine fails in a step, its error is raised, and this object is closed.

        Raises:
            ValueError: a prompt or a parameter cannot be served. The message names it, and nothing is generated.
            RuntimeError: this object is closed, or a grammar cannot be compiled at present.
        """
        prompt_list, is_list = prompts_of(prompts)
        params = params_for(sampling_params, len(prompt_list), "prompts")
        with self._locked_engine() as engine:
            answers = []
            for index, (prompt, prompt_params) in enumerate(zip(prompt_list, params, strict=True)):
                location = PromptLocation("prompt", "prompts", index if is_list else None)
                if isinstance(prompt, str) and self._model.tokenizer is None:
                    remedy = "give token ids, or a folder with a tokenizer as tokenizer"
                    raise ValueError(f"{location.name}: a text needs a tokenizer, and this model has none; {remedy}")
                text = prompt if isinstance(prompt, str) else None
                call = self._prepare_call(read_completion, {"prompt": [prompt], **prompt_params.body()}, location)
                answers.append(PendingAnswer(text, call.choices, call.formatter))
            return self._run_batch(engine, answers, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params | Sequence[Params] = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, and return one output per conversation, in order.

        `messages` and the keyword arguments have the form that /v1/chat/completions takes (docs/chat.md); the keyword
        arguments apply to all conversations. `sampling_params`, `use_tqdm` and Ctrl-C are as in `generate`.

        Raises:
            ValueError: a conversation or a parameter cannot be served, or the model has no chat template.
            RuntimeError: this object is closed, or a grammar cannot be compiled at present.
        """
        conversations, is_list = conversations_of(messages)
        params = params_for(sampling_params, len(conversations), "messages")
        other_fields = {
            "tools": None if tools is None else list(tools),
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            "reasoning_effort": reasoning_effort,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        with self._locked_engine() as engine:
            if self._model.tokenizer is None or not self._model.tokenizer.has_template:
                raise ValueError("messages: this model has no chat template; give a prompt to generate()")
            answers = []
            for index, (conversation, prompt_params) in enumerate(zip(conversations, params, strict=True)):
                location = PromptLocation("messages", "messages", index if is_list else None)
                call = self._prepare_call(
                    read_chat, {"messages": conversation, **prompt_params.chat_body(), **other_fields}, location
                )
                answers.append(PendingAnswer(None, call.choices, call.formatter))
            return self._run_batch(engine, answers, use_tqdm)

    def info(self) -> RankInfo:
        """Return the resolved settings, including every value that was chosen automatically.

        Raises:
            RuntimeError: this object is closed, perhaps because its engine failed.
        """
        with self._locked_engine() as engine:
            return engine.info()

    def close(self) -> None:
        """Wait for a running call, then free the model's memory and end its helper process and thread. Idempotent."""
        with self._lock:
            self._close_engine("this LLM is closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _locked_engine(self) -> Iterator[Engine]:
        """Yield the engine under the lock, so that one caller uses it at a time."""
        with self._lock:
            if self._engine is None:
                raise RuntimeError(self._closed_message)
            yield self._engine

    def _close_engine(self, message: str) -> None:
        """Close the engine; later calls raise RuntimeError with the message `message`. The caller holds the lock."""
        if self._engine is not None:
            self._engine.close()
            self._engine, self._closed_message = None, message
            self._finalizer()

    def _prepare_call(
        self, read_request: RequestReader, body: Mapping[str, Any], location: PromptLocation
    ) -> GenerateCall:
        """Parse the request body of one prompt into its sequences. Errors name the prompt's index in the list.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
            RuntimeError: the request failed with a status of 500 or above: its grammar cannot be compiled now.
        """
        try:
            with location.origins.translate_errors():
                call = self._model.prepare_call(read_request(self._model, self._model.limits, body))
        except ApiError as error:
            error_class = ValueError if error.status < 500 else RuntimeError
            raise error_class(location.prefix_message(error.message)) from None
        if WARNING_HEADER in call.headers:
            logger.warning("%s", location.prefix_message(call.headers[WARNING_HEADER]))
        return call

    def _run_batch(self, engine: Engine, answers: Sequence[PendingAnswer], use_tqdm: bool) -> list[RequestOutput]:
        """Run all sequences until they finish and return one output per prompt."""
        unfinished = {choice.request.request_id: (answer, choice) for answer in answers for choice in answer.choices}
        requests = [choice.request for _, choice in unfinished.values()]
        step_outputs = steps(engine, requests, MAX_SUBMITTED_PER_SLOT * engine.config.max_running_requests)
        progress = Progress(len(answers), use_tqdm)
        with defer_interrupt() as interrupt, progress, closing(self._close_on_failure(step_outputs)) as guarded_outputs:
            for outputs in guarded_outputs:
                for output in outputs:
                    answer, choice = unfinished[output.request_id]
                    answer.add_output(choice, output)
                    progress.add_tokens(len(output.token_ids))
                    if output.finish_reason is not None:
                        del unfinished[output.request_id]
                        if answer.is_finished:
                            progress.add_finished(answer)
                if interrupt.pressed and unfinished:
                    raise KeyboardInterrupt
        tokenizer = None if self._model.tokenizer is None else self._model.tokenizer.text_tokenizer
        return [answer.output(tokenizer) for answer in answers]

    def _close_on_failure(self, step_outputs: Steps) -> Steps:
        """Yield the items of `step_outputs`. If the engine fails inside a step, close it, because its state is not
        reliable, and raise the error. A ValueError does not close the engine: it means that a request was refused.
        """
        try:
            yield from step_outputs
        except (ValueError, GeneratorExit):  # a request was refused before the first step, or the caller stopped
            raise
        except BaseException as error:
            self._close_engine(f"the engine of this LLM failed ({type(error).__name__}: {error}); make a new one")
            raise
