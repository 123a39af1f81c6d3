"""Serves one call of a generating route, from its body to its answer."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from cluster.api.core.adapter import CoreRequest, GenerateCall, Reader
from cluster.api.core.constraints import ChatOutput, chat_of, constraint_in
from cluster.api.core.conversation import ChatRequest, TokenizeRequest
from cluster.api.core.errors import ApiError, overloaded, shown, unsupported, wrong
from cluster.api.core.fields import warning_headers
from cluster.api.core.generation import CompletionRequest, DetokenizeRequest, check_model
from cluster.api.core.limits import RequestLimits, off_loop
from cluster.api.core.sequences import Delta, OutputSequence, run
from cluster.api.core.service import Served, Service
from cluster.api.core.tokenizer import Encoded
from cluster.api.core.wire import BodyReader, EventStream, json_bytes, until_client_leaves
from cluster.api.http.middleware import cache_salt, key_of, note
from cluster.request import Request
from cluster.tokenizer.stop_strings import StoppedText
from cluster.tokenizer.tokenizer import TextTokenizer


async def answer(
    service: Service, limits: RequestLimits, intake: BodyReader, request: HttpRequest, read: Reader
) -> Response:
    """Serve one call of a generating route, and return JSON or an event stream. `read` parses the route's bodies.

    Raises:
        ApiError: the call is refused, or fails before its answer begins.
        ClientGoneError: the client closed the connection before its answer began (streamed) or was complete.
    """
    arrived = time.perf_counter()
    try:
        if (why := service.engine.full()) is not None:  # refuse before spending time on the body
            raise overloaded(why, whoever=True)
        async with intake.json(request) as (body, length):
            asked = await off_loop(length, lambda: read(service, limits, body))
            salt = cache_salt(key_of(request.scope), asked.fields.cache_salt)
            with asked.origins.named():
                call = await prepare(service, limits, asked, length, salt)
    except ApiError as error:
        service.metrics.on_refused("overloaded" if error.code == "overloaded" else "invalid")
        raise
    note(request.scope, call.call_id, call.choices)
    for choice in call.choices:
        choice.began(service.metrics.on_start(arrived))
    deltas = run(service.engine, call.choices)
    with asked.origins.named():
        if asked.fields.stream:
            return await _streamed(request, call, deltas)
        async with aclosing(deltas):
            said = await until_client_leaves(request.receive, _all(deltas))
    whole = await off_loop(call.scores, lambda: json_bytes(call.shape.body(said)))
    return Response(whole, media_type="application/json", headers=call.headers)


async def _streamed(request: HttpRequest, call: GenerateCall, deltas: AsyncGenerator[Delta, None]) -> Response:
    """Wait for the first tokens, then return the event stream. Before them, an error can still set the HTTP status."""
    try:
        first = await until_client_leaves(request.receive, _first(deltas))
    except BaseException:
        await deltas.aclose()
        raise

    async def events() -> AsyncGenerator[bytes, None]:
        yield await off_loop(call.scores, partial(call.shape.events, first))
        async for delta in deltas:
            if delta.prompt_logprobs:
                yield await off_loop(call.scores, partial(call.shape.events, delta))
            else:
                yield call.shape.events(delta)
        if last := call.shape.end():
            yield last

    return EventStream(events(), deltas, call.headers, call.shape.failed, call.shape.alive)


async def _first(deltas: AsyncGenerator[Delta, None]) -> Delta:
    return await anext(deltas)


async def _all(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    return [delta async for delta in deltas]


async def prepare(
    service: Served, limits: RequestLimits, asked: CoreRequest, length: int, salt: int = 0
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
    model, fields, tokenizer = service.model, asked.fields, service.tokenizer
    words = None if tokenizer is None else tokenizer.text
    for field in ("stop", "bad_words"):
        if getattr(fields, field) and tokenizer is None:
            raise _needs_tokenizer(field)
    chat, warnings = ChatOutput(), list(asked.warnings)
    if isinstance(fields, ChatRequest):
        room = None if fields.truncate_prompt_tokens else model.room
        encoded = await _encoded(service, fields, length, fields.add_special_tokens, room)
        assert tokenizer is not None
        warnings += [asked.origins.reworded(warning) for warning in encoded.warnings]
        chat = await off_loop(length, partial(chat_of, tokenizer, fields, encoded.text))
        warnings += [asked.origins.reworded(warning) for warning in chat.warnings]
        constraint, prompts = chat.constraint, [tuple(encoded.ids)]
        blamed, default_tokens = ["messages"], model.room
    else:
        constraint, prompts = constraint_in(fields), await _prompt_ids(service, limits, fields, length)
        blamed = ["prompt"] if len(prompts) == 1 else [f"prompt.{at}" for at in range(len(prompts))]
        default_tokens = limits.default_completion_tokens

    grammar = None if constraint is None else await service.grammars.compiled(constraint)
    # From here on `prompts` holds the kept tokens; `whole` holds the prompts before truncation.
    whole, prompts = prompts, [fields.kept(ids, model.room, default_tokens) for ids in prompts]
    scores = _scores(fields, prompts, limits)
    echoes = await off_loop(length, lambda: _echoes(words, fields, whole, prompts))
    call_id, sequence_id = _ids(asked.prefix, fields.request_id)

    def make_choices() -> list[OutputSequence]:
        choices: list[OutputSequence] = []
        adjustments = fields.adjustments(words, model.vocab_size)
        for at, ids in enumerate(prompts):
            if not ids:
                raise wrong(blamed[at], "must not be empty")
            params = fields.sampling(model, len(ids), default_tokens, blamed[at])
            for i in range(fields.samples):
                text = None
                if words is not None:
                    include_stop, least = fields.include_stop_str_in_output, fields.min_tokens
                    text = StoppedText(words, ids, params.stop, include_stop, least, chat.special)
                own = replace(params, seed=fields.seed_of(i), adjustments=adjustments, grammar=grammar)
                # If not streamed, only sample 0 computes the prompt's log-probabilities; the other samples get a copy.
                # The samples of a stream are sent separately, so each sample computes them.
                if i and not fields.stream:
                    own = replace(own, prompt_logprobs=None)
                index = len(choices)
                # 0 is `resumed_tokens`: the sequence is new, not resumed
                sequence = Request(f"{sequence_id}-{index}", ids, own, 0, fields.routed_dp_rank, salt)
                choices.append(OutputSequence(index, at, sequence, text, chat.reader()))
        return choices

    choices = await off_loop(length, make_choices)
    headers = warning_headers(warnings) | ({asked.id_header: call_id} if asked.id_header else {})
    return GenerateCall(asked, call_id, model.model_id, choices, words, headers, echoes, scores)


def _ids(prefix: str, request_id: str | None) -> tuple[str, str]:
    """Return the id of a call, and the common prefix of the ids of its sequences. With a client's `request_id` the
    prefix gets a random suffix, because a client may use a `request_id` again.
    """
    unique = uuid.uuid4().hex
    call_id = prefix + (request_id or unique)
    return call_id, f"{call_id}-{unique[:8]}" if request_id else call_id


def _echoes(
    words: TextTokenizer | None,
    fields: CompletionRequest | ChatRequest,
    whole: list[tuple[int, ...]],
    kept: list[tuple[int, ...]],
) -> tuple[str, ...]:
    """Return the prompt texts with which an answer with `echo` begins; empty without `echo`. `whole` are the prompts,
    `kept` the prompts after truncation. A prompt that was truncated or sent as token ids is decoded from its kept
    tokens.
    """
    if not isinstance(fields, CompletionRequest) or not fields.echo:
        return ()
    texts = []
    for given, ids, left in zip(fields.prompt, whole, kept, strict=True):
        if isinstance(given, str) and len(left) == len(ids):
            texts.append(given)
        else:  # an incomplete character at the end is left out, because the output may complete it
            texts.append("" if words is None else words.settled(words.textual(left)))
    return tuple(texts)


def _scores(fields: CompletionRequest | ChatRequest, prompts: list[tuple[int, ...]], limits: RequestLimits) -> int:
    """Return the number of prompt log-probabilities in the answer.

    Raises:
        ApiError: 400 if the number exceeds `limits.prompt_logprobs`.
    """
    wanted = fields.prompt_logprobs_wanted()
    if wanted is None:
        return 0
    scores = sum(map(len, prompts)) * fields.samples * (wanted + 1)  # + 1: the prompt token itself
    if scores > limits.prompt_logprobs:
        param = "echo" if fields.prompt_logprobs is None else "prompt_logprobs"
        raise wrong(
            param,
            f"the answer would hold {scores} log-probabilities of prompts, more than the "
            f"{limits.prompt_logprobs} of one call; ask for fewer alternatives, or send several requests",
        )
    return scores


async def _encoded(
    service: Served,
    fields: ChatRequest | TokenizeRequest,
    length: int,
    special: bool,
    context_length: int | None = None,
) -> Encoded:
    if service.tokenizer is None:
        raise _needs_tokenizer("messages")
    return await service.tokenizer.encode_chat(
        fields.messages, fields, length, add_special_tokens=special, context_length=context_length
    )


async def tokens_of(service: Service, fields: TokenizeRequest, length: int) -> tuple[int, ...]:
    """Return the token ids for /tokenize. `length` is the length of the body in bytes.

    Raises:
        ApiError: the model has no tokenizer or no chat template, or the template refuses the conversation.
    """
    if fields.prompt is None:
        return tuple((await _encoded(service, fields, length, fields.special)).ids)
    if service.tokenizer is None:
        raise _needs_tokenizer("prompt")
    return tuple(await service.tokenizer.encode(fields.prompt, fields.special, length))


async def count(
    service: Service, limits: RequestLimits, intake: BodyReader, request: HttpRequest, read: Reader
) -> tuple[int, list[str]]:
    """Return the number of prompt tokens of a conversation, and warnings about its body.

    Raises:
        ApiError: the body cannot be served, the model has no tokenizer or no chat template, or the template refuses it.
    """
    async with intake.json(request) as (body, length):
        asked = await off_loop(length, lambda: read(service, limits, body))
        assert isinstance(asked.fields, ChatRequest)
        with asked.origins.named():
            encoded = await _encoded(service, asked.fields, length, asked.fields.add_special_tokens)
    return len(encoded.ids), asked.warnings


async def text_of(service: Service, fields: DetokenizeRequest, length: int) -> str:
    """Return the text for /detokenize. `length` is the length of the body in bytes.

    Raises:
        ApiError: the body names another model, the model has no tokenizer, or a token id is not in its vocabulary.
    """
    check_model(service.model, fields.model)
    if service.tokenizer is None:
        raise _needs_tokenizer("tokens")
    await off_loop(length, lambda: _check_ids(fields.tokens, service.model.vocab_size, "tokens"))
    return await service.tokenizer.decode(fields.tokens)


def _check_ids(ids: Sequence[int], vocab: int, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        outside = shown(next(token for token in ids if not 0 <= token < vocab))
        raise wrong(param, f"token id {outside} lies outside the vocabulary [0, {vocab})")


async def _prompt_ids(
    service: Served, limits: RequestLimits, fields: CompletionRequest, length: int
) -> list[tuple[int, ...]]:
    prompts = fields.prompt
    if len(prompts) * fields.samples > limits.sequences:
        many = "n" if fields.samples == fields.n else "best_of"
        raise wrong(
            "prompt",
            f"{len(prompts)} prompts with {many} = {fields.samples} make {len(prompts) * fields.samples} "
            f"sequences, more than the {limits.sequences} of one request; send several requests",
        )
    vocab, special, found = service.model.vocab_size, fields.add_special_tokens, []
    context = None if fields.truncate_prompt_tokens else service.model.context_length
    for at, prompt in enumerate(prompts):
        blamed = "prompt" if len(prompts) == 1 else f"prompt.{at}"
        if isinstance(prompt, str):
            if service.tokenizer is None:
                raise _needs_tokenizer("prompt")
            found.append(tuple(await service.tokenizer.encode(prompt, special, length, context, blamed)))
            continue
        await off_loop(length, partial(_check_ids, prompt, vocab, blamed))
        found.append(tuple(prompt))
    return found


def _needs_tokenizer(field: str) -> ApiError:
    return unsupported(field, "this model is served without a tokenizer; send token ids as prompt to /v1/completions")
