"""Law 1 to the bit, in float32 and bfloat16: by the kernels in C a stream is plain decoding's, token for token, and
every log-probability has the same bits, whatever it was drafted, batched or chunked with; also with caches in FP8.
"""

from functools import cache

import pytest

from cluster.engine import build_engine
from cluster.request import Request, RequestParams
from tests.pairwise import covering
from tests.parity.harness import config_of, run, tiny_pair
from tests.unit.kernels.library import c_serves

SAMPLINGS = {"greedy": {}, "0.9": {"temperature": 0.9}, "filtered": {"temperature": 1.0, "top_k": 12, "top_p": 0.9}}
SHAPES = {"plain, together": 0, "chain": 1, "tree": 3}
DTYPES = ("float32", "bfloat16")
CUTS = ((7, "auto"), (512, "auto"), (7, "fp8_e4m3"))
"""Rows of a chunk, and how the KV cache is kept."""


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


Said = dict[str, list[tuple[int, object]]]


def said(target: str, draft: str | None, asked: list[Request], **settings: object) -> Said:
    """Of each request its tokens with their log-probabilities."""
    config = config_of(target, draft, attention_backend="c", **settings)  # type: ignore[arg-type]
    result, found = run(build_engine(config), asked), {}
    for one in asked:
        outputs = result.outputs[one.request_id]
        tokens = [token for output in outputs for token in output.token_ids]
        logprobs = [each for output in outputs for each in output.logprobs or ()]
        assert len(tokens) == len(logprobs) == 14
        found[one.request_id] = list(zip(tokens, logprobs, strict=True))
    return found


@cache
def alone(dtype: str, sampling: str, kept: str) -> Said:
    """Plain decoding, one request after the other, its prompt at once."""
    found: Said = {}
    for one in requests(sampling):
        found |= said(tiny_pair()[0], None, [one], dtype=dtype, kv_cache_dtype=kept, disable_radix_cache=True)
    return found


@pytest.mark.parametrize(
    ("shape", "sampling", "dtype", "cut"), covering([list(SHAPES), list(SAMPLINGS), DTYPES, CUTS], 3)
)
def test_c_backend_tokens_and_logprobs_are_bit_equal_to_plain_decoding(
    shape: str, sampling: str, dtype: str, cut: tuple[int, str]
) -> None:
    c_serves()
    chunk, kept = cut
    target, draft = tiny_pair()
    topk = SHAPES[shape]
    settings = {
        "dtype": dtype,
        "kv_cache_dtype": kept,
        "chunked_prefill_size": chunk,
        "mixed_prefill_size": min(chunk, 24),
    }
    given = said(target, draft if topk else None, requests(sampling), topk=topk or 1, **settings)
    assert given == alone(dtype, sampling, kept)
