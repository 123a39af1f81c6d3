"""`LLM`: offline inference in the caller's process, as in vLLM: `LLM("DIR", draft="DIR").generate([...])`.

Each prompt becomes the body of a REST request, and the REST routes' code parses it. So a server would answer the same.
"""

import logging
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self

from cluster.api.core.adapter import GenerateCall, Reader
from cluster.api.core.errors import ApiError
from cluster.api.core.fields import WARNING_HEADER
from cluster.api.openai.answers import read_chat, read_completion
from cluster.chat.formats.choose import named
from cluster.config import ConfigError
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.offline.arguments import Params, Prompt, PromptPlace, config_of, conversations_of, params_for, prompts_of
from cluster.offline.interrupts import interrupt_held
from cluster.offline.local_model import LocalModel, SamplingDefaults
from cluster.offline.outputs import GrowingAnswer, RequestOutput
from cluster.offline.progress import Progress
from cluster.offline.stepping import steps
from cluster.request import SequenceOutput as StepOutput
from cluster.status import RankInfo

logger = logging.getLogger(__name__)

Steps = Generator[tuple[StepOutput, ...], None, None]
HELD = 2  # the engine holds at most HELD * max_running_requests sequences: enough to fill each place that gets free


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
        """Load a model. `model` and `draft` are folders of safetensors or names on a hub. Without a draft, decoding
        is plain, without speculation.

        `settings` are engine settings of docs/settings.md, such as `dtype` or `context_length`, in SGLang's or vLLM's
        names. `sampling_defaults`, `tool_call_parser` and `reasoning_parser` are application settings of the same page.

        Raises:
            ConfigError: a model cannot be found or served, or a setting cannot be honoured; the message names the
                setting and says what to write instead.
        """
        if sampling_defaults not in ("model", "openai"):
            raise ConfigError(f"sampling_defaults must be 'model' or 'openai', got {sampling_defaults!r}")
        parsers = named(tool_call_parser, reasoning_parser)
        self._lock = threading.Lock()
        self._over = ""  # the error message of calls after close() or a failed step
        self._engine: Engine | None = build_engine(config_of(model, draft, tokenizer, settings))
        self._model = LocalModel(self._engine, parsers, sampling_defaults)
        self._free = weakref.finalize(self, self._model.close)

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
        `use_tqdm` draws a progress bar. Ctrl-C ends the batch after the current step; this object can be used again.

        Raises:
            ValueError: a prompt or a parameter cannot be served. The message names it, and nothing is generated.
            RuntimeError: this object is closed, or its engine failed.
        """
        given, many = prompts_of(prompts)
        params = params_for(sampling_params, len(given), "prompts")
        with self._running() as engine:
            asked = []
            for at, (prompt, own) in enumerate(zip(given, params, strict=True)):
                place = PromptPlace("prompt", "prompts", at if many else None)
                if isinstance(prompt, str) and self._model.tokenizer is None:
                    remedy = "give token ids, or a folder with a tokenizer as tokenizer"
                    raise ValueError(f"{place.name}: a text needs a tokenizer, and this model has none; {remedy}")
                text = prompt if isinstance(prompt, str) else None
                call = self._understood(read_completion, {"prompt": [prompt], **own.body()}, place)
                asked.append(GrowingAnswer(text, call.choices, call.shape))
            return self._answered(engine, asked, use_tqdm)

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
            RuntimeError: this object is closed, or its engine failed.
        """
        given, many = conversations_of(messages)
        params = params_for(sampling_params, len(given), "messages")
        beside = {
            "tools": None if tools is None else list(tools),
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            "reasoning_effort": reasoning_effort,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        with self._running() as engine:
            if self._model.tokenizer is None or not self._model.tokenizer.has_template:
                raise ValueError("messages: this model has no chat template; give a prompt to generate()")
            asked = []
            for at, (talk, own) in enumerate(zip(given, params, strict=True)):
                place = PromptPlace("messages", "messages", at if many else None)
                call = self._understood(read_chat, {"messages": talk, **own.chat_body(), **beside}, place)
                asked.append(GrowingAnswer(None, call.choices, call.shape))
            return self._answered(engine, asked, use_tqdm)

    def info(self) -> RankInfo:
        """Return the resolved settings, including every value that was chosen automatically.

        Raises:
            RuntimeError: this object is closed, or its engine failed.
        """
        with self._running() as engine:
            return engine.info()

    def close(self) -> None:
        """Free the model's memory and end its helper process and thread, after any running call. Idempotent."""
        with self._lock:
            self._end("this LLM is closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _running(self) -> Iterator[Engine]:
        """Yield the engine under the lock, so that one caller uses it at a time."""
        with self._lock:
            if self._engine is None:
                raise RuntimeError(self._over)
            yield self._engine

    def _end(self, why: str) -> None:
        """Close the engine; later calls raise RuntimeError with the message `why`. The caller holds the lock."""
        if self._engine is not None:
            self._engine.close()
            self._engine, self._over = None, why
            self._free()

    def _understood(self, read: Reader, body: Mapping[str, Any], place: PromptPlace) -> GenerateCall:
        """Parse the request body of one prompt into its sequences. Errors name the prompt's index in the list.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
            RuntimeError: the request failed with a status of 500 or above: its grammar cannot be compiled now.
        """
        try:
            with place.origins.named():
                call = self._model.understood(read(self._model, self._model.limits, body))
        except ApiError as error:
            kind = ValueError if error.status < 500 else RuntimeError
            raise kind(place.told(error.message)) from None
        if WARNING_HEADER in call.headers:
            logger.warning("%s", place.told(call.headers[WARNING_HEADER]))
        return call

    def _answered(self, engine: Engine, answers: Sequence[GrowingAnswer], use_tqdm: bool) -> list[RequestOutput]:
        """Run all sequences until they finish and return one output per prompt."""
        owners = {choice.request.request_id: (answer, choice) for answer in answers for choice in answer.choices}
        requests = [choice.request for _, choice in owners.values()]
        given = steps(engine, requests, HELD * engine.config.max_running_requests)
        bar = Progress(len(answers), use_tqdm)
        with interrupt_held() as held, bar, closing(self._guarded(given)) as taken:
            for outputs in taken:
                for output in outputs:
                    answer, choice = owners[output.request_id]
                    answer.take(choice, output)
                    bar.gave(len(output.token_ids))
                    if output.finish_reason is not None:
                        del owners[output.request_id]
                        if answer.ended:
                            bar.done(answer)
                if held.pressed and owners:
                    raise KeyboardInterrupt
        tokenizer = None if self._model.tokenizer is None else self._model.tokenizer.text
        return [answer.output(tokenizer) for answer in answers]

    def _guarded(self, given: Steps) -> Steps:
        """Yield the items of `given`. If the engine fails inside a step, close it: its state is no longer reliable."""
        try:
            yield from given
        except (ValueError, GeneratorExit):  # a request was refused before the first step, or the caller stopped
            raise
        except BaseException as error:
            self._end(f"the engine of this LLM failed ({type(error).__name__}: {error}); make a new one")
            raise
