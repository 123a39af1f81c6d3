"""Fields that score or truncate prompts, over a real engine: echo, logprobs, best_of, truncate_prompt_tokens.

The reference is the target's forward pass by transformers in float64. Tokens are bytes: a text has one per byte.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.api.core.limits import RequestLimits
from cluster.api.http.routes import make_app
from tests.parity.test_transformers import oracle
from tests.serving.api.scripted import IM_START, MODEL, VOCAB, Client, events
from tests.serving.api.test_engine import EngineService
from tests.serving.api.test_engine import services as services
from tests.support.pairwise import covering
from tests.support.tiny_checkpoints import target_folder

Services = tuple[EngineService, EngineService]
ROUNDING = 1e-6  # transformers keeps its rope angles in float32
CONTEXT = 1024


@cache
def reference_logprobs(ids: tuple[int, ...]) -> Tensor:
    """The reference's `[T, V]` log-probabilities of the next token after each token of a text."""
    with torch.inference_mode():
        logits = oracle(target_folder(vocab_size=VOCAB, max_position=CONTEXT))(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def reference_token_logprobs(ids: Sequence[int]) -> list[float]:
    """The reference's log-probability of each token but the first."""
    return reference_logprobs(tuple(ids))[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()


def clients(services: Services) -> list[Client]:
    return [Client(make_app(service)) for service in services]


def complete_once(client: Client, **fields: Any) -> dict[str, Any]:
    """The only choice of a completion."""
    response = client.complete(**fields)
    assert response.status_code == 200, response.text
    (only_choice,) = response.json()["choices"]
    return only_choice


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
@pytest.mark.parametrize("prompt", ["x", "def f(x):", "naïve 日本 text", "a long one, " * 40, [104, IM_START, 105]])
def test_echo_returns_the_prompt_with_its_logprobs(
    services: Services, prompt: str | list[int], max_tokens: int
) -> None:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) else "hi"
    for client in clients(services):
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 3, "ignore_eos": True}
        response = client.complete(**body, echo=True, return_token_ids=True)
        answer, logprobs = response.json()["choices"][0], response.json()["choices"][0]["logprobs"]
        unechoed = client.complete(**body).json()["choices"][0] if max_tokens else {"text": "", "logprobs": None}
        assert answer["text"] == text + unechoed["text"]
        assert answer["finish_reason"] == "length"
        usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), max_tokens)
        assert len(answer["token_ids"]) == max_tokens and answer["prompt_token_ids"] == ids
        all_ids = [*ids, *answer["token_ids"]]
        assert {len(column) for column in logprobs.values()} == {len(all_ids)}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(reference_token_logprobs(all_ids), abs=2e-3)
        if unechoed["logprobs"]:
            shifted = [len(text) + offset for offset in unechoed["logprobs"]["text_offset"]]
            output_columns = {name: column[len(ids) :] for name, column in logprobs.items()}
            assert output_columns == approximately({**unechoed["logprobs"], "text_offset": shifted})
        for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[: len(ids)]:
            assert answer["text"].startswith(token, offset) or "\ufffd" in token or token == "<|im_start|>"


def lm_eval_score(answer: dict[str, Any], context_length: int, end: int | None) -> tuple[float, bool]:
    """What lm-eval reads from an echo: a continuation's log-probability, and whether greedy decoding gives it."""
    logprobs = answer["logprobs"]
    token_logprobs, top_logprobs = (
        logprobs["token_logprobs"][context_length:end],
        logprobs["top_logprobs"][context_length:end],
    )
    return sum(token_logprobs), all(
        token_logprob == max(top.values()) for token_logprob, top in zip(token_logprobs, top_logprobs, strict=True)
    )


@pytest.mark.parametrize(("max_tokens", "end"), [(1, -1), (0, None)])
def test_lm_eval_scores_continuations_from_echo_logprobs(services: Services, max_tokens: int, end: int | None) -> None:
    """lm-eval asks for one token, which it drops, or for none. The third continuation is the greedy one."""
    context = "The vault: "
    greedy = complete_once(clients(services)[1], prompt=context, max_tokens=9, temperature=0, return_token_ids=True)
    continuations = [list(b"opens"), list(b"is shut, and stays so"), greedy["token_ids"]]
    prompts = [[*context.encode(), *tokens] for tokens in continuations]
    for client in clients(services):
        body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "seed": 1, "echo": True}
        for _ in range(2):  # the second time with all prompts in the prefix cache
            answers = client.complete(**body).json()["choices"]
            for answer, ids, tokens in zip(answers, prompts, continuations, strict=True):
                score, is_greedy = lm_eval_score(answer, len(context), end)
                assert score == pytest.approx(sum(reference_token_logprobs(ids)[len(context) - 1 :]), abs=1e-2)
                assert is_greedy == (tokens is continuations[2])


@pytest.mark.parametrize(
    ("prompt", "fields", "max_tokens"),
    covering([[["one", "naïve 日"], [[104, 0xE2, 0x82]]], [{"logprobs": 2}, {}, {"logprobs": 0, "n": 2}], [0, 8]]),
)
def test_streamed_echo_equals_the_complete_echo(
    services: Services, prompt: list[Any], fields: dict[str, Any], max_tokens: int
) -> None:
    client = clients(services)[0]
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 3, "echo": True, "ignore_eos": True, **fields}
    complete_choices = client.complete(**body).json()["choices"]
    streamed_choices: list[dict[str, Any]] = [{"text": "", "logprobs": {}} for _ in complete_choices]
    for chunk in events(client.complete(**body, stream=True)):
        for piece in chunk["choices"]:
            streamed_choice = streamed_choices[piece["index"]]
            streamed_choice["text"] += piece["text"]
            for name, column in (piece["logprobs"] or {}).items():
                streamed_choice["logprobs"].setdefault(name, []).extend(column)
    for streamed, answer in zip(streamed_choices, complete_choices, strict=True):
        assert streamed["text"] == answer["text"]
        assert streamed["logprobs"] == approximately(answer["logprobs"] or {})


def approximately(logprobs: dict[str, Any]) -> dict[str, Any]:
    """The same logprobs, to be compared up to rounding. Numbers round differently when other rows share the batch."""
    wrapper_of = {
        "token_logprobs": lambda p: p if p is None else pytest.approx(p, abs=ROUNDING),
        "top_logprobs": lambda top: top if top is None else pytest.approx(top, abs=ROUNDING),
    }
    return {name: [wrapper_of.get(name, lambda x: x)(x) for x in column] for name, column in logprobs.items()}


def test_echo_decodes_a_character_split_between_prompt_and_output(services: Services) -> None:
    """The echo and the output together are the text of all tokens, also where the prompt ends inside a character."""
    client = clients(services)[1]
    for prompt in ([104, 0xE2], [104, 0xE2, 0x82]):
        answer = complete_once(
            client, prompt=prompt, max_tokens=6, seed=5, echo=True, return_token_ids=True, ignore_eos=True
        )
        tokenizer = services[1].tokenizer
        assert tokenizer is not None
        assert answer["text"] == tokenizer.text_tokenizer.decode([*prompt, *answer["token_ids"]])


@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs_match_the_reference_on_both_endpoints(services: Services, top: int) -> None:
    for client in clients(services):
        for _ in range(2):
            completion = client.complete(prompt="score me", max_tokens=2, prompt_logprobs=top, n=2).json()
            chat_answer = client.chat(prompt_logprobs=top, max_tokens=2, return_token_ids=True).json()
            chat_ids = client.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
            assert "prompt_logprobs" not in chat_answer["choices"][0]
            for prompt_entries, ids in (
                (completion["choices"][0]["prompt_logprobs"], list(b"score me")),
                (completion["choices"][1]["prompt_logprobs"], list(b"score me")),
                (chat_answer["prompt_logprobs"], chat_ids),
            ):
                assert prompt_entries[0] is None and len(prompt_entries) == len(ids)
                for entry, token, row in zip(prompt_entries[1:], ids[1:], reference_logprobs(tuple(ids)), strict=False):
                    token_entry, sorted_row = entry[str(token)], row.sort(descending=True)
                    assert next(iter(entry)) == str(token), "the prompt's own token comes first"
                    assert token_entry["logprob"] == pytest.approx(float(row[token]), abs=2e-3)
                    assert token_entry["rank"] == int((sorted_row.indices == token).nonzero()) + 1
                    assert {*entry} == {str(token), *map(str, sorted_row.indices[:top].tolist())}
                    assert token_entry["decoded_token"] == services[0].tokenizer.text_tokenizer.token_text(token)[0]  # type: ignore[union-attr]
                    ranks = sorted(value["rank"] for value in entry.values())
                    assert ranks == [*range(1, top + 1), *([token_entry["rank"]] if token_entry["rank"] > top else [])]


def test_echo_logprobs_and_prompt_logprobs_may_have_different_counts(services: Services) -> None:
    """One call may ask for one count as `logprobs` of the echo, and for another count as `prompt_logprobs`."""
    answer = complete_once(clients(services)[0], prompt="a b c", max_tokens=1, echo=True, logprobs=1, prompt_logprobs=4)
    assert all(len(top) in (1, 2) for top in answer["logprobs"]["top_logprobs"][1:])
    assert all(len(entry) in (4, 5) for entry in answer["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in complete_once(clients(services)[0], prompt="a", max_tokens=1, echo=True, logprobs=1)


def test_prompt_scoring_fills_the_prefix_cache_but_does_not_read_the_cache(services: Services) -> None:
    client, prompt = clients(services)[0], "a prompt of its own, long enough for many pages " * 3
    first = client.complete(prompt=prompt, max_tokens=4, seed=1, echo=True, logprobs=2).json()
    prompt_details = client.complete(prompt=prompt, max_tokens=4, seed=1).json()["usage"]["prompt_tokens_details"]
    second = client.complete(prompt=prompt, max_tokens=4, seed=1, echo=True, logprobs=2).json()
    assert prompt_details["cached_tokens"] > 100
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    second_logprobs = second["choices"][0]["logprobs"]
    assert second_logprobs == approximately(first["choices"][0]["logprobs"])


def test_prompt_may_fill_the_context_with_zero_max_tokens(services: Services) -> None:
    for client in clients(services):
        answer = complete_once(client, prompt="y" * CONTEXT, max_tokens=0, echo=True, logprobs=0)
        assert len(answer["logprobs"]["tokens"]) == CONTEXT and answer["finish_reason"] == "length"
        assert client.complete(prompt="y" * CONTEXT, max_tokens=1).status_code == 400
        silent = client.complete(prompt="nothing", max_tokens=0).json()
        assert silent["choices"][0]["text"] == "" and silent["usage"]["completion_tokens"] == 0
        assert [c["choices"][0]["text"] for c in events(client.complete(prompt="x", max_tokens=0, stream=True))] == [""]


@pytest.mark.parametrize("prompt", ["best", ["best", "of all"]])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_best_of_returns_the_likeliest_samples(services: Services, prompt: Any, logprobs: int | None) -> None:
    for client in clients(services):
        body = {"prompt": prompt, "max_tokens": 7, "seed": 11, "ignore_eos": True}
        all_samples = client.complete(**body, n=5, logprobs=0).json()
        best = client.complete(**body, n=2, best_of=5, logprobs=logprobs).json()
        prompts = 1 if isinstance(prompt, str) else len(prompt)
        likeliest = []
        for start in range(0, 5 * prompts, 5):
            prompt_samples = all_samples["choices"][start : start + 5]
            likeliest += sorted(prompt_samples, key=lambda one: sum(one["logprobs"]["token_logprobs"]), reverse=True)[
                :2
            ]
        assert [one["text"] for one in best["choices"]] == [one["text"] for one in likeliest]
        assert [one["index"] for one in best["choices"]] == list(range(2 * prompts))
        assert best["usage"]["completion_tokens"] == all_samples["usage"]["completion_tokens"] == 35 * prompts
        assert all((one["logprobs"] is None) == (logprobs is None) for one in best["choices"])
        one = client.complete(**body, best_of=5, echo=True, prompt_logprobs=1).json()["choices"]
        assert [found["text"].endswith(likeliest[2 * at]["text"]) for at, found in enumerate(one)] == [True] * prompts
        assert all(len(found["prompt_logprobs"]) > 1 for found in one)


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(services: Services) -> None:
    client, text = clients(services)[0], "0123456789" * 200
    body = {"max_tokens": 20, "temperature": 0, "return_token_ids": True}

    def ids(**fields: Any) -> list[int]:
        prompt_ids: list[int] = complete_once(client, **{"prompt": text, **body, **fields})["prompt_token_ids"]
        return prompt_ids

    all_ids = list(text.encode())
    assert client.complete(prompt=text, **body).status_code == 400, "the full prompt is too long"
    assert ids(truncate_prompt_tokens=7) == all_ids[-7:]
    assert ids(truncate_prompt_tokens=-1) == all_ids[-(CONTEXT - 20) :]
    assert ids(truncate_prompt_tokens=-1, max_tokens=None) == all_ids[-(CONTEXT - 16) :]
    for limit in (99, -1):
        assert ids(prompt="short", truncate_prompt_tokens=limit) == [*b"short"]
    assert ids(prompt=all_ids, truncate_prompt_tokens=5) == all_ids[-5:]
    truncated, short_prompt = (
        complete_once(client, prompt=p, **body, truncate_prompt_tokens=30) for p in (text, all_ids[-30:])
    )
    assert truncated["text"] == short_prompt["text"]
    echoed = complete_once(client, prompt="naïve 日本", max_tokens=0, echo=True, logprobs=0, truncate_prompt_tokens=7)
    assert echoed["text"] == " 日本" and echoed["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 2, 2]
    assert client.complete(prompt=text, truncate_prompt_tokens=CONTEXT).status_code == 400
    chat_answer = client.chat(truncate_prompt_tokens=9, max_tokens=1, return_token_ids=True).json()
    assert bytes(chat_answer["prompt_token_ids"]) == b"ssistant\n" and chat_answer["usage"]["prompt_tokens"] == 9


# name: (fields of the request, the error's param, a part of the error's message). FIELDS in test_bad_input.py has
# more bad values of these fields.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "negative prompt_logprobs": ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    "best_of of many prompts": ({"best_of": 8, "prompt": ["a"] * 17}, "prompt", "best_of = 8"),
    "truncate_prompt_tokens of -2": (
        {"truncate_prompt_tokens": -2},
        "truncate_prompt_tokens",
        "greater than or equal to -1",
    ),
    "suffix": ({"suffix": "}"}, "suffix", "do not fill one in"),
    "SGLang's return_logprob": ({"return_logprob": True}, "return_logprob", "use logprobs, and prompt_logprobs"),
    "SGLang's logprob_start_len": ({"logprob_start_len": 0}, "logprob_start_len", "use prompt_logprobs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_scoring_field_gives_a_400_that_names_the_field(services: Services, name: str) -> None:
    fields, param, message_part = REFUSED[name]
    response = clients(services)[1].complete(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and message_part in error["message"], error


def test_prompt_logprobs_of_a_call_are_limited(services: Services) -> None:
    """The limit counts the prompt log-probabilities of all prompts and samples of one call."""
    client = Client(make_app(services[1], RequestLimits(prompt_logprobs=100)))
    allowed_fields = {"prompt": "x" * 50, "max_tokens": 1}
    assert client.complete(**allowed_fields, echo=True, logprobs=1).status_code == 200
    for fields, param in (
        ({"echo": True, "logprobs": 2}, "echo"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "n": 3}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "prompt": ["x" * 50] * 3}, "prompt_logprobs"),
    ):
        error = client.complete(**{**allowed_fields, **fields}).json()["error"]
        assert error["param"] == param and "100 of one call" in error["message"]


def test_seed_minus_1_top_p_0_and_include_obfuscation_are_accepted(services: Services) -> None:
    client = clients(services)[0]
    body = {"prompt": "x", "max_tokens": 3}
    assert client.complete(**body, seed=-1).status_code == 200
    greedy = complete_once(client, **body, temperature=0)
    assert complete_once(client, **body, top_p=0)["text"] == greedy["text"]
    options = {"include_obfuscation": True, "include_usage": True}
    assert events(client.complete(**body, stream=True, stream_options=options))[-1]["usage"]["completion_tokens"] == 3


def test_answer_with_many_prompt_logprobs_is_complete(services: Services) -> None:
    """The server builds an answer with many numbers outside the event loop."""
    response = clients(services)[1].post(
        "/v1/completions", {"model": MODEL, "prompt": "z" * 1000, "max_tokens": 1, "prompt_logprobs": 20}
    )
    entries = json.loads(response.content)["choices"][0]["prompt_logprobs"]
    assert len(entries) == 1000 and all(len(entry) >= 20 for entry in entries[1:])
