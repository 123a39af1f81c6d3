"""Sampled texts of a speculating engine fit the target's filtered distribution (chi-square)."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from cluster.engine import build_engine
from cluster.request import RequestParams
from tests.parity.harness import VOCAB, config_of, request, run
from tests.parity.reference import target_reference
from tests.tiny import draft_folder, target_folder
from tests.unit.sampling.samplings import filtered, sampling_of

SIGNIFICANCE = 0.001
PROMPT = [3, 9, 4, 17, 6]


def next_token(folder: str, text: list[int], options: dict[str, float]) -> np.ndarray:
    """The filtered distribution after a text, from the dense reference."""
    logits = target_reference(folder).run(text).logits[-1] / options["temperature"]
    return filtered(logits[None, None], sampling_of(1, **options))[0, 0].softmax(-1).numpy()


def fits(counts: np.ndarray, p: np.ndarray, tests: int) -> bool:
    """Chi-square with rare cells lumped together, at SIGNIFICANCE over `tests` tests (Bonferroni)."""
    assert counts[p == 0].sum() == 0, "a token that the filters rule out was drawn"
    expected = p * counts.sum()
    common = expected >= 5
    observed, wanted = [*counts[common]], [*expected[common]]
    if expected[~common].sum() > 0:
        observed.append(counts[~common].sum())
        wanted.append(expected[~common].sum())
    return len(wanted) < 2 or bool(stats.chisquare(observed, wanted).pvalue > SIGNIFICANCE / tests)


@pytest.mark.parametrize("count", [4_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "min_p": 0.02}],
    ids=["T=1", "filtered"],
)
def test_sampled_tree_decoding_fits_the_filtered_target_distribution(options: dict[str, float], count: int) -> None:
    """The first token, pairs of the first two, and the third given the likeliest first two, from trees of topk 6."""
    target = target_folder(vocab_size=VOCAB, spread=0.3)
    settings = {"max_running_requests": 500, "max_total_tokens": 500 * 32, "page_size": 4}
    engine = build_engine(config_of(target, draft_folder(target), 6, 2, **settings))
    params = RequestParams(**options)  # type: ignore[arg-type]
    texts, lens = [], []
    for part in range(0, count, 500):
        asked = [
            request(f"{seed}", PROMPT, params, seed=seed * 2_654_435_761, max_tokens=3, ignore_eos=True)
            for seed in range(part, part + 500)
        ]
        result = run(engine, asked)
        texts += [result.tokens[one.request_id] for one in asked]
        lens += result.accept_lens
    drawn = np.array(texts)
    assert np.mean(lens) > 1.1, "speculation was on"

    first = next_token(target, PROMPT, options)
    assert fits(np.bincount(drawn[:, 0], minlength=VOCAB), first, 3)
    pairs = np.zeros((VOCAB, VOCAB))
    for token in np.flatnonzero(first):
        pairs[token] = first[token] * next_token(target, [*PROMPT, int(token)], options)
    assert fits(np.bincount(drawn[:, 0] * VOCAB + drawn[:, 1], minlength=VOCAB**2), pairs.ravel(), 3)
    third, whole = np.zeros(VOCAB**3), drawn[:, 0] * VOCAB**2 + drawn[:, 1] * VOCAB + drawn[:, 2]
    for a, b in product(np.argsort(first)[-4:], range(VOCAB)):
        if pairs[a, b] > 0:
            at = (int(a) * VOCAB + b) * VOCAB
            third[at : at + VOCAB] = pairs[a, b] * next_token(target, [*PROMPT, int(a), b], options)
    among = np.isin(drawn[:, 0], np.argsort(first)[-4:])
    assert fits(np.bincount(whole[among], minlength=VOCAB**3), third / third.sum(), 3)
    assert torch.tensor(texts).shape == (count, 3)
