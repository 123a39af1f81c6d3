"""What clients send to score prompts and to reshape them, over a real engine: echo, log-probabilities, best_of, cuts.

The oracle is the target's own forward, by transformers in float64. Tokens are bytes, so a text has one per byte.
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
from tests.api.scripted import IM_START, MODEL, VOCAB, Client, events
from tests.api.test_engine import EngineService
from tests.api.test_engine import services as services
from tests.pairwise import covering
from tests.parity.test_transformers import oracle
from tests.tiny import target_folder

Services = tuple[EngineService, EngineService]
NEAR = 1e-6  # transformers keeps its rope angles in float32
CONTEXT = 1024


@cache
def rows(ids: tuple[int, ...]) -> Tensor:
    """`[T, V]` log-probabilities after each token of a text."""
    with torch.inference_mode():
        logits = oracle(target_folder(vocab_size=VOCAB, max_position=CONTEXT))(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def expected(ids: Sequence[int]) -> list[float]:
    """Of each token but the first."""
    return rows(tuple(ids))[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()


def clients(services: Services) -> list[Client]:
    return [Client(make_app(service)) for service in services]


def choice(client: Client, **fields: Any) -> dict[str, Any]:
    response = client.complete(**fields)
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    return found


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
        answer, told = response.json()["choices"][0], response.json()["choices"][0]["logprobs"]
        plain = client.complete(**body).json()["choices"][0] if max_tokens else {"text": "", "logprobs": None}
        assert answer["text"] == text + plain["text"]
        assert answer["finish_reason"] == "length"
        usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), max_tokens)
        assert len(answer["token_ids"]) == max_tokens and answer["prompt_token_ids"] == ids
        whole = [*ids, *answer["token_ids"]]
        assert {len(column) for column in told.values()} == {len(whole)}
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx(expected(whole), abs=2e-3)
        if plain["logprobs"]:
            shifted = [len(text) + at for at in plain["logprobs"]["text_offset"]]
            after = {name: column[len(ids) :] for name, column in told.items()}
            assert after == approximately({**plain["logprobs"], "text_offset": shifted})
        for token, at in list(zip(told["tokens"], told["text_offset"], strict=True))[: len(ids)]:
            assert answer["text"].startswith(token, at) or "\ufffd" in token or token == "<|im_start|>"


def as_lm_eval_reads(answer: dict[str, Any], ctxlen: int, end: int | None) -> tuple[float, bool]:
    """The sum of a continuation's log-probabilities and whether greedy decoding gives it, from an echoed answer."""
    told = answer["logprobs"]
    numbers, tops = told["token_logprobs"][ctxlen:end], told["top_logprobs"][ctxlen:end]
    return sum(numbers), all(own == max(top.values()) for own, top in zip(numbers, tops, strict=True))


@pytest.mark.parametrize(("max_tokens", "end"), [(1, -1), (0, None)])
def test_lm_eval_scores_continuations_from_echo_logprobs(services: Services, max_tokens: int, end: int | None) -> None:
    """Both ways: with a token that is dropped, and without one. Greedy texts are seen as such."""
    context = "The vault: "
    greedy = choice(clients(services)[1], prompt=context, max_tokens=9, temperature=0, return_token_ids=True)
    continuations = [list(b"opens"), list(b"is shut, and stays so"), greedy["token_ids"]]
    prompts = [[*context.encode(), *tokens] for tokens in continuations]
    for client in clients(services):
        body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "seed": 1, "echo": True}
        for _ in range(2):  # and once more, when all of it is cached
            answers = client.complete(**body).json()["choices"]
            for answer, ids, tokens in zip(answers, prompts, continuations, strict=True):
                total, likeliest = as_lm_eval_reads(answer, len(context), end)
                assert total == pytest.approx(sum(expected(ids)[len(context) - 1 :]), abs=1e-2)
                assert likeliest == (tokens is continuations[2])


@pytest.mark.parametrize(
    ("prompt", "fields", "max_tokens"),
    covering([[["one", "naïve 日"], [[104, 0xE2, 0x82]]], [{"logprobs": 2}, {}, {"logprobs": 0, "n": 2}], [0, 8]]),
)
def test_streamed_echo_equals_the_complete_echo(
    services: Services, prompt: list[Any], fields: dict[str, Any], max_tokens: int
) -> None:
    client = clients(services)[0]
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 3, "echo": True, "ignore_eos": True, **fields}
    whole = client.complete(**body).json()["choices"]
    told: list[dict[str, Any]] = [{"text": "", "logprobs": {}} for _ in whole]
    for chunk in events(client.complete(**body, stream=True)):
        for piece in chunk["choices"]:
            mine = told[piece["index"]]
            mine["text"] += piece["text"]
            for name, column in (piece["logprobs"] or {}).items():
                mine["logprobs"].setdefault(name, []).extend(column)
    for streamed, answer in zip(told, whole, strict=True):
        assert streamed["text"] == answer["text"]
        assert streamed["logprobs"] == approximately(answer["logprobs"] or {})


def approximately(told: dict[str, Any]) -> dict[str, Any]:
    """The same, with numbers that are compared up to rounding: rows are computed in other company."""
    near = {
        "token_logprobs": lambda p: p if p is None else pytest.approx(p, abs=NEAR),
        "top_logprobs": lambda top: top if top is None else pytest.approx(top, abs=NEAR),
    }
    return {name: [near.get(name, lambda x: x)(x) for x in column] for name, column in told.items()}


def test_echo_decodes_a_character_split_between_prompt_and_output(services: Services) -> None:
    """Echo and output together are the text of all tokens, however the prompt ends."""
    client = clients(services)[1]
    for prompt in ([104, 0xE2], [104, 0xE2, 0x82]):
        answer = choice(client, prompt=prompt, max_tokens=6, seed=5, echo=True, return_token_ids=True, ignore_eos=True)
        tokenizer = services[1].tokenizer
        assert tokenizer is not None
        assert answer["text"] == tokenizer.text_tokenizer.decode([*prompt, *answer["token_ids"]])


@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs_match_the_reference_on_both_endpoints(services: Services, top: int) -> None:
    for client in clients(services):
        for _ in range(2):
            one = client.complete(prompt="score me", max_tokens=2, prompt_logprobs=top, n=2).json()
            talk = client.chat(prompt_logprobs=top, max_tokens=2, return_token_ids=True).json()
            said = client.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
            assert "prompt_logprobs" not in talk["choices"][0]
            for told, ids in (
                (one["choices"][0]["prompt_logprobs"], list(b"score me")),
                (one["choices"][1]["prompt_logprobs"], list(b"score me")),
                (talk["prompt_logprobs"], said),
            ):
                assert told[0] is None and len(told) == len(ids)
                for entry, token, row in zip(told[1:], ids[1:], rows(tuple(ids)), strict=False):
                    own, likely = entry[str(token)], row.sort(descending=True)
                    assert next(iter(entry)) == str(token), "the prompt's own token comes first"
                    assert own["logprob"] == pytest.approx(float(row[token]), abs=2e-3)
                    assert own["rank"] == int((likely.indices == token).nonzero()) + 1
                    assert {*entry} == {str(token), *map(str, likely.indices[:top].tolist())}
                    assert own["decoded_token"] == services[0].tokenizer.text_tokenizer.token_text(token)[0]  # type: ignore[union-attr]
                    ranks = sorted(value["rank"] for value in entry.values())
                    assert ranks == [*range(1, top + 1), *([own["rank"]] if own["rank"] > top else [])]


def test_echo_logprobs_and_prompt_logprobs_may_have_different_counts(services: Services) -> None:
    """`logprobs` of an echo and `prompt_logprobs` may differ."""
    answer = choice(clients(services)[0], prompt="a b c", max_tokens=1, echo=True, logprobs=1, prompt_logprobs=4)
    assert all(len(top) in (1, 2) for top in answer["logprobs"]["top_logprobs"][1:])
    assert all(len(entry) in (4, 5) for entry in answer["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in choice(clients(services)[0], prompt="a", max_tokens=1, echo=True, logprobs=1)


def test_prompt_scoring_fills_the_prefix_cache_but_does_not_read_the_cache(services: Services) -> None:
    client, prompt = clients(services)[0], "a prompt of its own, long enough for many pages " * 3
    first = client.complete(prompt=prompt, max_tokens=4, seed=1, echo=True, logprobs=2).json()
    used = client.complete(prompt=prompt, max_tokens=4, seed=1).json()["usage"]["prompt_tokens_details"]
    again = client.complete(prompt=prompt, max_tokens=4, seed=1, echo=True, logprobs=2).json()
    assert used["cached_tokens"] > 100
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    told = again["choices"][0]["logprobs"]
    assert told == approximately(first["choices"][0]["logprobs"])


def test_prompt_may_fill_the_context_with_zero_max_tokens(services: Services) -> None:
    for client in clients(services):
        answer = choice(client, prompt="y" * CONTEXT, max_tokens=0, echo=True, logprobs=0)
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
        every = client.complete(**body, n=5, logprobs=0).json()
        best = client.complete(**body, n=2, best_of=5, logprobs=logprobs).json()
        prompts = 1 if isinstance(prompt, str) else len(prompt)
        likely = []
        for start in range(0, 5 * prompts, 5):
            some = every["choices"][start : start + 5]
            likely += sorted(some, key=lambda one: sum(one["logprobs"]["token_logprobs"]), reverse=True)[:2]
        assert [one["text"] for one in best["choices"]] == [one["text"] for one in likely]
        assert [one["index"] for one in best["choices"]] == list(range(2 * prompts))
        assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 35 * prompts
        assert all((one["logprobs"] is None) == (logprobs is None) for one in best["choices"])
        one = client.complete(**body, best_of=5, echo=True, prompt_logprobs=1).json()["choices"]
        assert [found["text"].endswith(likely[2 * at]["text"]) for at, found in enumerate(one)] == [True] * prompts
        assert all(len(found["prompt_logprobs"]) > 1 for found in one)


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(services: Services) -> None:
    client, text = clients(services)[0], "0123456789" * 200
    body = {"max_tokens": 20, "temperature": 0, "return_token_ids": True}

    def ids(**fields: Any) -> list[int]:
        found: list[int] = choice(client, **{"prompt": text, **body, **fields})["prompt_token_ids"]
        return found

    whole = list(text.encode())
    assert client.complete(prompt=text, **body).status_code == 400, "too long as it is"
    assert ids(truncate_prompt_tokens=7) == whole[-7:]
    assert ids(truncate_prompt_tokens=-1) == whole[-(CONTEXT - 20) :]
    assert ids(truncate_prompt_tokens=-1, max_tokens=None) == whole[-(CONTEXT - 16) :]
    for most in (99, -1):
        assert ids(prompt="short", truncate_prompt_tokens=most) == [*b"short"]
    assert ids(prompt=whole, truncate_prompt_tokens=5) == whole[-5:]
    cut, sent = (choice(client, prompt=p, **body, truncate_prompt_tokens=30) for p in (text, whole[-30:]))
    assert cut["text"] == sent["text"]
    echoed = choice(client, prompt="naïve 日本", max_tokens=0, echo=True, logprobs=0, truncate_prompt_tokens=7)
    assert echoed["text"] == " 日本" and echoed["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 2, 2]
    assert client.complete(prompt=text, truncate_prompt_tokens=CONTEXT).status_code == 400
    talk = client.chat(truncate_prompt_tokens=9, max_tokens=1, return_token_ids=True).json()
    assert bytes(talk["prompt_token_ids"]) == b"ssistant\n" and talk["usage"]["prompt_tokens"] == 9


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "prompt_logprobs in a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not in a stream"),
    "too many prompt_logprobs": ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    "negative prompt_logprobs": ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    "best_of below n": ({"best_of": 2, "n": 3}, "best_of", "at least n (3)"),
    "too many to choose from": ({"best_of": 129}, "best_of", "at most 128"),
    "the best in a stream": ({"best_of": 3, "stream": True}, "best_of", "known at the end"),
    "best_of of many prompts": ({"best_of": 8, "prompt": ["a"] * 17}, "prompt", "best_of = 8"),
    "a cut to nothing": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be positive, or -1"),
    "a cut of -2": ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    "a suffix": ({"suffix": "}"}, "suffix", "do not fill one in"),
    "SGLang's spelling": ({"return_logprob": True}, "return_logprob", "use logprobs, and prompt_logprobs"),
    "where SGLang begins": ({"logprob_start_len": 0}, "logprob_start_len", "use prompt_logprobs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_scoring_field_gives_a_400_that_names_the_field(services: Services, name: str) -> None:
    fields, param, words = REFUSED[name]
    response = clients(services)[1].complete(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_prompt_logprobs_of_a_call_are_limited(services: Services) -> None:
    """What one call may ask about its prompts, over all of them."""
    client = Client(make_app(services[1], RequestLimits(prompt_logprobs=100)))
    good = {"prompt": "x" * 50, "max_tokens": 1}
    assert client.complete(**good, echo=True, logprobs=1).status_code == 200
    for fields, param in (
        ({"echo": True, "logprobs": 2}, "echo"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "n": 3}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "prompt": ["x" * 50] * 3}, "prompt_logprobs"),
    ):
        error = client.complete(**{**good, **fields}).json()["error"]
        assert error["param"] == param and "100 of one call" in error["message"]


def test_seed_minus_1_top_p_0_and_include_obfuscation_are_accepted(services: Services) -> None:
    client = clients(services)[0]
    body = {"prompt": "x", "max_tokens": 3}
    assert client.complete(**body, seed=-1).status_code == 200
    greedy = choice(client, **body, temperature=0)
    assert choice(client, **body, top_p=0)["text"] == greedy["text"]
    options = {"include_obfuscation": True, "include_usage": True}
    assert events(client.complete(**body, stream=True, stream_options=options))[-1]["usage"]["completion_tokens"] == 3


def test_answer_with_many_prompt_logprobs_is_complete(services: Services) -> None:
    """Where many numbers are asked for, the answer is made beside the event loop."""
    response = clients(services)[1].post(
        "/v1/completions", {"model": MODEL, "prompt": "z" * 1000, "max_tokens": 1, "prompt_logprobs": 20}
    )
    told = json.loads(response.content)["choices"][0]["prompt_logprobs"]
    assert len(told) == 1000 and all(len(entry) >= 20 for entry in told[1:])
