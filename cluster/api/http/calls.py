"""Serves one call of a route that generates text, from its body to its answer; also tokenizes and detokenizes."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from cluster.api.core.adapter import CoreRequest, GenerateCall, RequestReader
from cluster.api.core.constraints import ChatOutput, chat_output_of, constraint_of_request
from cluster.api.core.conversation import ChatRequest, TokenizeRequest
from cluster.api.core.errors import ApiError, invalid_value, overloaded_error, truncated_repr, unsupported_parameter
from cluster.api.core.fields import warning_headers
from cluster.api.core.generation import CompletionRequest, DetokenizeRequest, check_model
from cluster.api.core.limits import RequestLimits, run_off_loop
from cluster.api.core.sequences import Delta, OutputSequence, generate_deltas
from cluster.api.core.service import ServedModel, Service
from cluster.api.core.tokenizer import EncodedChat
from cluster.api.core.wire import BodyReader, EventStream, json_bytes, run_until_disconnect
from cluster.api.http.middleware import attach_call, cache_salt, key_of
from cluster.request import Request
from cluster.tokenizer.stop_strings import StoppedText
from cluster.tokenizer.tokenizer import TextTokenizer


async def answer(
    service: Service, limits: RequestLimits, body_reader: BodyReader, request: HttpRequest, read_request: RequestReader
) -> Response:
    """Serve one call of a route that generates text. Return a JSON answer or an event stream. `read_request` parses the
    body.

    Raises:
        ApiError: the call is refused, or fails before its answer begins.
        ClientDisconnectedError: the client closed the connection before a streamed answer began, or before another
            answer was complete.
    """
    arrived_at = time.perf_counter()
    try:
        if (overload := service.engine.overload()) is not None:  # refuse before spending time on the body
            raise overloaded_error(overload, for_every_client=True)
        async with body_reader.read_json(request) as (body, length):
            core_request = await run_off_loop(length, lambda: read_request(service, limits, body))
            salt = cache_salt(key_of(request.scope), core_request.fields.cache_salt)
            with core_request.origins.translate_errors():
                call = await prepare(service, limits, core_request, length, salt)
    except ApiError as error:
        service.metrics.on_refused("overloaded" if error.code == "overloaded" else "invalid")
        raise
    attach_call(request.scope, call.call_id, call.choices)
    for choice in call.choices:
        choice.attach_timer(service.metrics.on_start(arrived_at))
    deltas = generate_deltas(service.engine, call.choices)
    with core_request.origins.translate_errors():
        if core_request.fields.stream:
            return await _stream_response(request, call, deltas)
        async with aclosing(deltas):
            all_deltas = await run_until_disconnect(request.receive, _all_deltas(deltas))
    response_body = await run_off_loop(call.prompt_logprob_count, lambda: json_bytes(call.formatter.body(all_deltas)))
    return Response(response_body, media_type="application/json", headers=call.headers)


async def _stream_response(request: HttpRequest, call: GenerateCall, deltas: AsyncGenerator[Delta, None]) -> Response:
    """Wait for the first tokens, then return the event stream. So an error before the first tokens still decides the
    HTTP status.
    """
    try:
        first = await run_until_disconnect(request.receive, _first_delta(deltas))
    except BaseException:
        await deltas.aclose()
        raise

    async def events() -> AsyncGenerator[bytes, None]:
        yield await run_off_loop(call.prompt_logprob_count, partial(call.formatter.events, first))
        async for delta in deltas:
            if delta.prompt_logprobs:
                yield await run_off_loop(call.prompt_logprob_count, partial(call.formatter.events, delta))
            else:
                yield call.formatter.events(delta)
        if final_events := call.formatter.final_events():
            yield final_events

    return EventStream(events(), deltas, call.headers, call.formatter.error_events, call.formatter.keep_alive)


async def _first_delta(deltas: AsyncGenerator[Delta, None]) -> Delta:
    return await anext(deltas)


async def _all_deltas(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    return [delta async for delta in deltas]


async def prepare(
    service: ServedModel, limits: RequestLimits, core_request: CoreRequest, length: int, salt: int = 0
) -> GenerateCall:
    """Prepare all that a call needs before it goes to the engine.

    - Encode and truncate the prompts. Compile the grammar, if one is requested.
    - Choose the id of the call.
    - Make one sequence per sample of each prompt, with its id, sampling parameters, seed and the cache `salt`.
    - Make the object that writes the answer.

    `length` is the length of the body in bytes. The work on a long body runs off the event loop.

    Raises:
        ApiError: the request cannot be served; the error names the field at fault.
    """
    model, fields, tokenizer = service.model, core_request.fields, service.tokenizer
    text_tokenizer = None if tokenizer is None else tokenizer.text_tokenizer
    for field in ("stop", "bad_words"):
        if getattr(fields, field) and tokenizer is None:
            raise _no_tokenizer_error(field)
    chat, warnings = ChatOutput(), list(core_request.warnings)
    if isinstance(fields, ChatRequest):
        context_length = None if fields.truncate_prompt_tokens else model.max_request_tokens
        encoded = await _encode_chat(service, fields, length, fields.add_special_tokens, context_length)
        assert tokenizer is not None
        warnings += [core_request.origins.translate_warning(warning) for warning in encoded.warnings]
        chat = await run_off_loop(length, partial(chat_output_of, tokenizer, fields, encoded.text))
        warnings += [core_request.origins.translate_warning(warning) for warning in chat.warnings]
        constraint, prompts = chat.constraint, [tuple(encoded.ids)]
        error_params, default_tokens = ["messages"], model.max_request_tokens
    else:
        constraint, prompts = constraint_of_request(fields), await _tokenize_prompts(service, limits, fields, length)
        error_params = (
            ["prompt"] if len(prompts) == 1 else [f"prompt.{prompt_index}" for prompt_index in range(len(prompts))]
        )
        default_tokens = limits.default_completion_tokens

    grammar = None if constraint is None else await service.grammars.compile(constraint)
    # From here on `prompts` holds the prompts after truncation; `full_prompts` holds them before it.
    full_prompts, prompts = (
        prompts,
        [fields.truncated_prompt(ids, model.max_request_tokens, default_tokens) for ids in prompts],
    )
    num_prompt_logprobs = _count_prompt_logprobs(fields, prompts, limits)
    echo_texts = await run_off_loop(length, lambda: _echo_texts(text_tokenizer, fields, full_prompts, prompts))
    call_id, sequence_id = _make_ids(core_request.prefix, fields.request_id)

    def make_choices() -> list[OutputSequence]:
        choices: list[OutputSequence] = []
        adjustments = fields.logit_adjustments(text_tokenizer, model.vocab_size)
        for prompt_index, ids in enumerate(prompts):
            if not ids:
                raise invalid_value(error_params[prompt_index], "must not be empty")
            params = fields.sampling_params(model, len(ids), default_tokens, error_params[prompt_index])
            for sample in range(fields.samples_per_prompt):
                text = None
                if text_tokenizer is not None:
                    include_stop, min_tokens = fields.include_stop_str_in_output, fields.min_tokens
                    text = StoppedText(text_tokenizer, ids, params.stop, include_stop, min_tokens, chat.special_tokens)
                sample_params = replace(params, seed=fields.seed_of(sample), adjustments=adjustments, grammar=grammar)
                # If not streamed, only sample 0 computes the prompt's log-probabilities; the other samples get a copy.
                # The samples of a stream are sent separately, so each sample computes them.
                if sample and not fields.stream:
                    sample_params = replace(sample_params, prompt_logprobs=None)
                index = len(choices)
                # 0 is `resumed_tokens`: the sequence is new, not resumed
                sequence = Request(f"{sequence_id}-{index}", ids, sample_params, 0, fields.routed_dp_rank, salt)
                choices.append(OutputSequence(index, prompt_index, sequence, text, chat.reader()))
        return choices

    choices = await run_off_loop(length, make_choices)
    headers = warning_headers(warnings) | ({core_request.id_header: call_id} if core_request.id_header else {})
    return GenerateCall(
        core_request, call_id, model.model_id, choices, text_tokenizer, headers, echo_texts, num_prompt_logprobs
    )


def _make_ids(prefix: str, request_id: str | None) -> tuple[str, str]:
    """Return the id of a call, and the beginning that the ids of its sequences share. If the client sent a
    `request_id`, this beginning ends with random characters, because a client may use a `request_id` again.
    """
    random_id = uuid.uuid4().hex
    call_id = prefix + (request_id or random_id)
    return call_id, f"{call_id}-{random_id[:8]}" if request_id else call_id


def _echo_texts(
    text_tokenizer: TextTokenizer | None,
    fields: CompletionRequest | ChatRequest,
    full_prompts: list[tuple[int, ...]],
    truncated_prompts: list[tuple[int, ...]],
) -> tuple[str, ...]:
    """Return the texts of the prompts, with which the outputs begin if `echo` is set. Without `echo` return ().

    `full_prompts` and `truncated_prompts` are the token ids of the prompts before and after truncation. The text of a
    prompt that was truncated, or that was sent as token ids, is decoded from its truncated token ids.
    """
    if not isinstance(fields, CompletionRequest) or not fields.echo:
        return ()
    texts = []
    for prompt, token_ids, truncated_ids in zip(fields.prompt, full_prompts, truncated_prompts, strict=True):
        if isinstance(prompt, str) and len(truncated_ids) == len(token_ids):
            texts.append(prompt)
        else:  # an incomplete character at the end is left out, because the output may complete it
            texts.append(
                ""
                if text_tokenizer is None
                else text_tokenizer.decode_complete(text_tokenizer.visible_token_ids(truncated_ids))
            )
    return tuple(texts)


def _count_prompt_logprobs(
    fields: CompletionRequest | ChatRequest, prompts: list[tuple[int, ...]], limits: RequestLimits
) -> int:
    """Return the number of prompt log-probabilities in the answer.

    Raises:
        ApiError: 400 if the number exceeds `limits.prompt_logprobs`.
    """
    num_alternatives = fields.requested_prompt_logprobs()
    if num_alternatives is None:
        return 0
    num_logprobs = (
        sum(map(len, prompts)) * fields.samples_per_prompt * (num_alternatives + 1)
    )  # + 1: the prompt token itself
    if num_logprobs > limits.prompt_logprobs:
        param = "echo" if fields.prompt_logprobs is None else "prompt_logprobs"
        raise invalid_value(
            param,
            f"the answer would hold {num_logprobs} log-probabilities of prompts, more than the "
            f"{limits.prompt_logprobs} of one call; ask for fewer alternatives, or send several requests",
        )
    return num_logprobs


async def _encode_chat(
    service: ServedModel,
    fields: ChatRequest | TokenizeRequest,
    length: int,
    add_special_tokens: bool,
    context_length: int | None = None,
) -> EncodedChat:
    if service.tokenizer is None:
        raise _no_tokenizer_error("messages")
    return await service.tokenizer.encode_chat(
        fields.messages, fields, length, add_special_tokens=add_special_tokens, context_length=context_length
    )


async def tokenize(service: Service, fields: TokenizeRequest, length: int) -> tuple[int, ...]:
    """Return the token ids for /tokenize. `length` is the length of the body in bytes.

    Raises:
        ApiError: the model has no tokenizer or no chat template, or the template refuses the conversation.
    """
    if fields.prompt is None:
        return tuple((await _encode_chat(service, fields, length, fields.adds_special_tokens)).ids)
    if service.tokenizer is None:
        raise _no_tokenizer_error("prompt")
    return tuple(await service.tokenizer.encode(fields.prompt, fields.adds_special_tokens, length))


async def count_prompt_tokens(
    service: Service, limits: RequestLimits, body_reader: BodyReader, request: HttpRequest, read_request: RequestReader
) -> tuple[int, list[str]]:
    """Return the number of prompt tokens of a conversation, and warnings about its body.

    Raises:
        ApiError: the body cannot be served, the model has no tokenizer or no chat template, or the template refuses the
            conversation.
    """
    async with body_reader.read_json(request) as (body, length):
        core_request = await run_off_loop(length, lambda: read_request(service, limits, body))
        assert isinstance(core_request.fields, ChatRequest)
        with core_request.origins.translate_errors():
            encoded = await _encode_chat(service, core_request.fields, length, core_request.fields.add_special_tokens)
    warnings = [core_request.origins.translate_warning(warning) for warning in encoded.warnings]
    return len(encoded.ids), [*core_request.warnings, *warnings]


async def detokenize(service: Service, fields: DetokenizeRequest, length: int) -> str:
    """Return the text for /detokenize. `length` is the length of the body in bytes.

    Raises:
        ApiError: the body names another model, the model has no tokenizer, or a token id is not in its vocabulary.
    """
    check_model(service.model, fields.model)
    if service.tokenizer is None:
        raise _no_tokenizer_error("tokens")
    await run_off_loop(length, lambda: _check_ids(fields.tokens, service.model.vocab_size, "tokens"))
    return await service.tokenizer.decode(fields.tokens)


def _check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        invalid_id = truncated_repr(next(token for token in ids if not 0 <= token < vocab_size))
        raise invalid_value(param, f"token id {invalid_id} lies outside the vocabulary [0, {vocab_size})")


async def _tokenize_prompts(
    service: ServedModel, limits: RequestLimits, fields: CompletionRequest, length: int
) -> list[tuple[int, ...]]:
    prompts = fields.prompt
    if len(prompts) * fields.samples_per_prompt > limits.sequences:
        count_field = "n" if fields.samples_per_prompt == fields.n else "best_of"
        raise invalid_value(
            "prompt",
            f"{len(prompts)} prompts with {count_field} = {fields.samples_per_prompt} make "
            f"{len(prompts) * fields.samples_per_prompt} sequences, more than the {limits.sequences} of one request; "
            "send several requests",
        )
    vocab_size, add_special_tokens, prompt_ids = service.model.vocab_size, fields.add_special_tokens, []
    context_length = None if fields.truncate_prompt_tokens else service.model.context_length
    for index, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt.{index}"
        if isinstance(prompt, str):
            if service.tokenizer is None:
                raise _no_tokenizer_error("prompt")
            prompt_ids.append(
                tuple(await service.tokenizer.encode(prompt, add_special_tokens, length, context_length, param))
            )
            continue
        await run_off_loop(length, partial(_check_ids, prompt, vocab_size, param))
        prompt_ids.append(tuple(prompt))
    return prompt_ids


def _no_tokenizer_error(field: str) -> ApiError:
    return unsupported_parameter(
        field, "this model is served without a tokenizer; send token ids as prompt to /v1/completions"
    )
