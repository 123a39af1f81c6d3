"""Answers of /v1/completions and /v1/chat/completions to valid requests, complete and streamed."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from cluster.request import RequestParams, StepTree
from tests.serving.api.scripted import EOS, IM_END, IM_START, MODEL, Client, ScriptedService, events


def params_of(service: ScriptedService, index: int = -1) -> RequestParams:
    return service.engine.requests[index].params


def test_completion_answer_has_text_usage_and_speculation_counts(client: Client, service: ScriptedService) -> None:
    service.engine.script = b"the answer is forty-two, more or less"
    answer = client.complete(seed=7).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["choices"] == [
        {"index": 0, "text": "the answer is fo", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 16, 21)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    counts = answer["metrics"]["speculative_decoding"]
    histogram = counts["acceptance_histogram"]
    assert sum(histogram) == counts["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == counts["num_accepted_draft_tokens"]
    assert len(histogram) == counts["num_spec_tokens"] + 1
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == counts["num_accepted_draft_tokens"]
    assert details["rejected_prediction_tokens"] == counts["num_draft_tokens"] - counts["num_accepted_draft_tokens"]
    assert params_of(service) == RequestParams(seed=7, max_tokens=16)
    assert service.engine.requests[0].prompt_token_ids == tuple(b"hello")
    assert service.outcomes() == {"length": 1.0}


def test_chat_answer_has_message_usage_and_templated_prompt(client: Client, service: ScriptedService) -> None:
    service.engine.script = b"hello there"
    answer = client.chat(max_completion_tokens=40).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello there", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", EOS)
    assert answer["usage"]["completion_tokens"] == 12  # the EOS counts
    [request] = service.engine.requests
    prompt_ids = [IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"]
    assert request.prompt_token_ids == tuple(prompt_ids)
    assert 0 <= (request.params.seed or -1) < 2**63


def test_chat_without_max_tokens_may_fill_the_context(client: Client, service: ScriptedService) -> None:
    service.engine.script = b"ok"
    client.chat()
    [request] = service.engine.requests
    assert request.params.max_tokens == service.model.context_length - len(request.prompt_token_ids)


def test_kv_cache_size_limits_the_default_max_tokens(client: Client, service: ScriptedService) -> None:
    service.model = replace(service.model, kv_cache_tokens=40)
    service.engine.script = b"ok"
    client.chat()
    client.complete(prompt="x" * 30)
    chat, completion = service.engine.requests
    assert chat.params.max_tokens == 40 - len(chat.prompt_token_ids)
    assert completion.params.max_tokens == 10, "OpenAI's default is 16"
    answer = client.complete(prompt="x" * 30, max_tokens=11)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "this model's maximum context length is 40 tokens here, for which the KV cache has room" in error["message"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "ask for at most 10" in error["message"]
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 40


def test_template_arguments_and_text_parts_reach_the_prompt(client: Client, service: ScriptedService) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assistant_message = {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None, "annotations": []}
    client.chat(
        messages=[assistant_message, {"role": "user", "content": parts}],
        chat_template_kwargs={"shout": True},
        add_generation_prompt=False,
    )
    prompt = bytes(i for i in service.engine.requests[0].prompt_token_ids if i < 256)
    assert prompt == b"assistant\nx\nuser\nab\n!"


def test_streamed_completion_text_equals_the_complete_answer(client: Client, service: ScriptedService) -> None:
    service.engine.script = "naïve 日本語 😀 text".encode()
    complete_answer = client.complete(max_tokens=60).json()
    chunks = events(client.complete(max_tokens=60, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == complete_answer["choices"][0]["text"]
    assert "\ufffd" not in complete_answer["choices"][0]["text"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_stream_has_one_chunk_per_engine_step(client: Client, service: ScriptedService) -> None:
    service.engine.script = b"abcdefghijkl"
    options = {"include_usage": True}
    chunks = events(client.chat(max_tokens=12, stream=True, stream_options=options))
    first, *content, usage = chunks
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in content] == ["a", "bc", "def", "g", "hi", "jkl"]
    assert content[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 2.0


def test_continuous_usage_stats_put_usage_in_every_chunk(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.complete(max_tokens=6, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 6, 6]
    assert chunks[0]["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}


@pytest.mark.parametrize("stream", [False, True])
def test_n_samples_differ_and_repeat_with_the_same_seed(client: Client, service: ScriptedService, stream: bool) -> None:
    def texts(**fields: Any) -> list[str]:
        response = client.complete(stream=stream, **fields)
        choices = [c for e in events(response) for c in e["choices"]] if stream else response.json()["choices"]
        choice_texts = [""] * len({choice["index"] for choice in choices})
        for choice in choices:
            choice_texts[choice["index"]] += choice["text"]
        return choice_texts

    four_texts = texts(n=4, seed=11)
    assert len(set(four_texts)) == 4
    assert texts(n=4, seed=11) == four_texts
    assert texts(n=1, seed=11) == four_texts[:1]
    assert len({request.request_id for request in service.engine.requests}) == 9
    assert texts(prompt=["hello", "there"], n=2, seed=11) == four_texts[:2] * 2  # each prompt samples as if alone
    assert len(set(texts(n=3))) == 3
    assert texts(n=2) != texts(n=2)


@pytest.mark.parametrize("prompts", [["hello", "goodbye"], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]])
def test_usage_sums_over_prompts_and_samples(client: Client, prompts: list[Any]) -> None:
    answer = client.complete(prompt=prompts, n=3, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 24)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert "metrics" not in answer


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
def test_completion_accepts_text_token_ids_and_lists_of_both(
    client: Client, service: ScriptedService, prompt: Any, expected: list[bytes]
) -> None:
    assert client.complete(prompt=prompt).status_code == 200
    assert [request.prompt_token_ids for request in service.engine.requests] == [tuple(ids) for ids in expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop_reason", "tokens"),
    [
        ({"stop": "fgh"}, "abcde", "stop", "fgh", 8),
        ({"stop": ["zz", "hi", "ghij"]}, "abcdefg", "stop", "hi", 9),
        ({"stop": "fgh", "include_stop_str_in_output": True}, "abcdefgh", "stop", "fgh", 8),
        ({"stop": "a"}, "", "stop", "a", 1),
        ({"stop": "lq"}, "abcdefghijkl", "stop", EOS, 13),
        ({"stop": "kq", "max_tokens": 11}, "abcdefghijk", "length", None, 11),
        ({"stop_token_ids": [ord("d")]}, "abc", "stop", ord("d"), 4),
        ({"stop_token_ids": [ord("d")], "include_stop_str_in_output": True}, "abcd", "stop", ord("d"), 4),
        ({"ignore_eos": True, "max_tokens": 20}, "abcdefghijkl", "length", None, 20),
    ],
)
def test_stop_conditions_set_text_finish_reason_and_token_count(
    client: Client,
    service: ScriptedService,
    stream: bool,
    fields: dict[str, Any],
    text: str,
    reason: str,
    stop_reason: str | int | None,
    tokens: int,
) -> None:
    service.engine.script = b"abcdefghijkl"
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = client.complete(**{"max_tokens": 30, "stream": stream, **options, **fields})
    parts = events(response) if stream else [response.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (reason, stop_reason)
    assert parts[-1]["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_tokens_offsets_and_top_logprobs(
    client: Client, service: ScriptedService, stream: bool
) -> None:
    service.engine.script = "é<a".encode()
    response = client.complete(logprobs=2, max_tokens=4, stream=stream)
    parts = events(response) if stream else [response.json()]
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part["choices"][0]["logprobs"].items():
            columns[name] += values
    assert columns["tokens"] == ["\ufffd", "\ufffd", "<", "a"]
    assert columns["text_offset"] == [0, 0, 1, 2]
    assert columns["token_logprobs"] == [-0.5] * 4
    assert columns["top_logprobs"][2] == {"a": -1.0, "b": -2.0, "<": -0.5}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_tokens_bytes_and_top_logprobs(
    client: Client, service: ScriptedService, stream: bool
) -> None:
    service.engine.script = "é".encode()
    response = client.chat(logprobs=True, top_logprobs=1, max_tokens=3, stream=stream)
    parts = events(response)[1:] if stream else [response.json()]
    content = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd", "<eos>"]
    assert bytes(byte for entry in content[:2] for byte in entry["bytes"]).decode() == "é"
    assert content[2] == {
        "token": "<eos>",
        "logprob": -0.5,
        "bytes": list(b"<eos>"),
        "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]}],
    }


def test_zero_logprobs_still_returns_logprobs_of_sampled_tokens(client: Client, service: ScriptedService) -> None:
    assert client.complete(logprobs=0, max_tokens=1).json()["choices"][0]["logprobs"]["tokens"]
    assert params_of(service).logprobs == 0
    client.chat(logprobs=True, top_logprobs=None)
    assert params_of(service).logprobs == 0


def test_return_token_ids_adds_prompt_and_output_token_ids(client: Client, service: ScriptedService) -> None:
    service.engine.script = b"xyz"
    [choice] = client.complete(return_token_ids=True, max_tokens=3).json()["choices"]
    assert choice["token_ids"] == [*b"xyz"]
    assert choice["prompt_token_ids"] == [*b"hello"]
    chunks = events(client.complete(return_token_ids=True, max_tokens=3, stream=True))
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[*b"x"], [*b"yz"]]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[*b"hello"], None]
    chat = client.chat(return_token_ids=True, logprobs=True, return_tokens_as_token_ids=True, max_tokens=1).json()
    assert chat["prompt_token_ids"][0] == IM_START
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ord('x')}"


TREE = StepTree((120, 121, 0xC3, 122), (0, 0, 0, 1), (0, 1), 122, forced=1)
NODES = [
    {"parent": None, "forced": False, "token_id": 120, "token": "x"},
    {"parent": 0, "forced": False, "token_id": 121, "token": "y"},
    {"parent": 0, "forced": False, "token_id": 0xC3, "token": "\ufffd"},
    {"parent": 1, "forced": True, "token_id": 122, "token": "z"},
]


@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_return_tree_adds_the_draft_tree_of_each_step(client: Client, service: ScriptedService, kind: str) -> None:
    """A chunk holds the tree and the tokens of the same step. The first token comes from no tree."""
    service.engine.script, service.engine.tree = b"xyz", TREE
    send = getattr(client, kind)
    chunks = events(send(return_tree=True, max_tokens=3, stream=True))
    chunk_trees = [chunk["choices"][0].get("tree") for chunk in chunks]
    expected = {"nodes": NODES, "accepted": [0, 1], "bonus": {"token_id": 122, "token": "z"}}
    assert chunk_trees == [None] * (len(chunks) - 1) + [expected]
    assert params_of(service).return_tree
    assert all("tree" not in chunk["choices"][0] for chunk in events(send(max_tokens=3, stream=True)))
    assert not params_of(service).return_tree


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("complete", {}),
        ("chat", {}),
        ("chat", {"stream": True, "n": 2}),
        ("complete", {"stream": True, "prompt": ["a", "b"]}),
    ],
)
def test_return_tree_is_refused_unless_a_single_sequence_is_streamed(
    client: Client, kind: str, fields: dict[str, object]
) -> None:
    answer = getattr(client, kind)(return_tree=True, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "return_tree" and "stream is true" in error["message"]


def test_model_without_a_tokenizer_answers_with_token_ids(client: Client, service: ScriptedService) -> None:
    service.engine.script = b"xyz"
    service.tokenizer = None
    [choice] = client.complete(prompt=[1, 2, 3], max_tokens=3, logprobs=0).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["logprobs"]["tokens"][0]) == ("", [*b"xyz"], "token_id:120")


def test_sampling_fields_reach_the_engine(client: Client, service: ScriptedService) -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 2**63 - 1, "stop": ["a", "b", "a"]}
    assert client.complete(**fields).status_code == 200
    expected = RequestParams(0.7, 40, 0.9, 0.05, seed=2**63 - 1, max_tokens=16, stop=("a", "b"))
    assert params_of(service) == expected
    client.complete(top_k=-1, temperature=1e-9)
    assert (params_of(service).top_k, params_of(service).temperature) == (0, 0.0)
    client.complete(top_k=10**6)
    assert params_of(service).top_k == 0
    client.complete(temperature=0)
    assert params_of(service).temperature == 0.0


def test_seed_minus_1_means_random_and_top_p_0_means_greedy(client: Client, service: ScriptedService) -> None:
    """In vLLM, seed -1 means no seed. With top_p 0 only the likeliest token remains."""
    options = {"include_usage": True, "include_obfuscation": True}
    answer = client.complete(seed=-1, top_p=0, temperature=0.7, stream=True, stream_options=options)
    assert answer.status_code == 200, answer.text
    params = params_of(service)
    assert (params.temperature, params.top_p) == (0.0, 1.0)
    assert params.seed is not None and params.seed >= 0, "a random seed is drawn at admission"


def test_seeds_are_taken_modulo_2_to_the_64_in_every_api(client: Client, service: ScriptedService) -> None:
    """-2 and 2**64 - 2 are the same seed. 2**64 - 1 is a seed, although -1 means no seed."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    paths = {"/v1/chat/completions": chat, "/v1/messages": chat, "/v1/responses": {"input": "hi"}}
    for path, body in paths.items():
        for seed, used in ((-2, -2), (2**64 - 2, -2), (-(2**63), -(2**63)), (2**63, -(2**63)), (2**64 - 1, -1), (5, 5)):
            answer = client.post(path, {"model": MODEL, **body, "seed": seed})
            assert answer.status_code == 200, answer.text
            assert params_of(service).seed == used
    texts = [client.complete(seed=seed, n=2, temperature=1).json()["choices"] for seed in (-2, 2**64 - 2, 2)]
    sample_texts = [[choice["text"] for choice in choices] for choices in texts]
    assert sample_texts[0] == sample_texts[1] != sample_texts[2] and sample_texts[0][0] != sample_texts[0][1]


def test_answer_id_contains_the_given_request_id(client: Client, service: ScriptedService) -> None:
    answers = [client.complete(request_id="mine-1").json()["id"] for _ in range(2)]
    assert answers == ["cmpl-mine-1"] * 2
    assert len({request.request_id for request in service.engine.requests}) == 2
    assert client.complete(rid="x").json()["id"] == "cmpl-x"


def test_seed_of_the_second_sample_is_derived_from_the_first_seed(client: Client, service: ScriptedService) -> None:
    client.complete(n=2, seed=5)
    derived = int.from_bytes(hashlib.blake2b(b"5/1", digest_size=8).digest(), "big") >> 1
    assert [request.params.seed for request in service.engine.requests] == [5, derived]


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank"])
def test_routed_dp_rank_reaches_the_engine_with_every_sample(
    client: Client, service: ScriptedService, name: str
) -> None:
    client.complete(n=2, **{name: 3})
    client.chat(**{name: 0})
    client.chat()
    assert [request.routed_dp_rank for request in service.engine.requests] == [3, 3, 0, None]
