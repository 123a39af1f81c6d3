"""Law 1 to the bit, with the C kernels in float32 and bfloat16. A request gets the tokens of plain decoding, and every
log-probability has the same bits, whatever the draft, the batch and the chunks are; also with caches in FP8.
"""

from functools import cache

import pytest

from cluster.engine import build_engine
from cluster.request import Request, RequestParams
from tests.parity.harness import config_of, run, tiny_pair
from tests.support.pairwise import covering
from tests.unit.kernels.library import skip_unless_c_backend

SAMPLINGS = {"greedy": {}, "0.9": {"temperature": 0.9}, "filtered": {"temperature": 1.0, "top_k": 12, "top_p": 0.9}}
SHAPES = {"plain, batched": 0, "chain": 1, "tree": 3}
DTYPES = ("float32", "bfloat16")
CHUNKS_AND_CACHES = ((7, "auto"), (512, "auto"), (7, "fp8_e4m3"))
"""Pairs of `chunked_prefill_size` and `kv_cache_dtype`."""


def requests(sampling: str) -> list[Request]:
    lengths = (3, 17, 40, 9, 1, 26)
    return [
        Request(
            f"r{i}",
            tuple(1 + (n * 7 + i) % 20 for n in range(length)),
            RequestParams(max_tokens=14, seed=i, logprobs=3, ignore_eos=True, **SAMPLINGS[sampling]),  # type: ignore[arg-type]
        )
        for i, length in enumerate(lengths)
    ]


TokensWithLogprobs = dict[str, list[tuple[int, object]]]


def tokens_with_logprobs(
    target: str, draft: str | None, batch: list[Request], **settings: object
) -> TokensWithLogprobs:
    """Run the requests; return each request's tokens with their log-probabilities."""
    config = config_of(target, draft, attention_backend="c", **settings)  # type: ignore[arg-type]
    result, results = run(build_engine(config), batch), {}
    for request in batch:
        outputs = result.outputs[request.request_id]
        tokens = [token for output in outputs for token in output.token_ids]
        logprobs = [token_logprobs for output in outputs for token_logprobs in output.logprobs or ()]
        assert len(tokens) == len(logprobs) == 14
        results[request.request_id] = list(zip(tokens, logprobs, strict=True))
    return results


@cache
def plain_results(dtype: str, sampling: str, kv_cache_dtype: str) -> TokensWithLogprobs:
    """The oracle: plain decoding of the requests, one by one, each prompt in one chunk."""
    results: TokensWithLogprobs = {}
    for request in requests(sampling):
        results |= tokens_with_logprobs(
            tiny_pair()[0], None, [request], dtype=dtype, kv_cache_dtype=kv_cache_dtype, disable_radix_cache=True
        )
    return results


@pytest.mark.parametrize(
    ("shape", "sampling", "dtype", "chunk_and_cache"),
    covering([list(SHAPES), list(SAMPLINGS), DTYPES, CHUNKS_AND_CACHES], 3),
)
def test_c_backend_tokens_and_logprobs_are_bit_equal_to_plain_decoding(
    shape: str, sampling: str, dtype: str, chunk_and_cache: tuple[int, str]
) -> None:
    skip_unless_c_backend()
    chunk, kv_cache_dtype = chunk_and_cache
    target, draft = tiny_pair()
    topk = SHAPES[shape]
    settings = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "chunked_prefill_size": chunk,
        "mixed_prefill_size": min(chunk, 24),
    }
    results = tokens_with_logprobs(target, draft if topk else None, requests(sampling), topk=topk or 1, **settings)
    assert results == plain_results(dtype, sampling, kv_cache_dtype)
