"""Sampled texts of a speculating engine fit the target's filtered distribution (chi-square)."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from cluster.engine import build_engine
from cluster.request import RequestParams
from tests.parity.harness import VOCAB, config_of, make_request, run
from tests.parity.reference import target_reference
from tests.support.tiny_checkpoints import draft_folder, target_folder
from tests.unit.sampling.samplings import apply_filters, sampling_of

SIGNIFICANCE = 0.001
PROMPT = [3, 9, 4, 17, 6]


def next_token(folder: str, text: list[int], options: dict[str, float]) -> np.ndarray:
    """The filtered distribution after a text, from the dense reference."""
    logits = target_reference(folder).run(text).logits[-1] / options["temperature"]
    return apply_filters(logits[None, None], sampling_of(1, **options))[0, 0].softmax(-1).numpy()


def fits(counts: np.ndarray, p: np.ndarray, tests: int) -> bool:
    """Return whether the counts fit the distribution `p` by a chi-square test. Cells with an expected count below 5 are
    merged. SIGNIFICANCE is divided by the number of `tests` (Bonferroni).
    """
    assert counts[p == 0].sum() == 0, "a token that the filters rule out was drawn"
    expected = p * counts.sum()
    common = expected >= 5
    observed_counts, expected_counts = [*counts[common]], [*expected[common]]
    if expected[~common].sum() > 0:
        observed_counts.append(counts[~common].sum())
        expected_counts.append(expected[~common].sum())
    return len(expected_counts) < 2 or bool(
        stats.chisquare(observed_counts, expected_counts).pvalue > SIGNIFICANCE / tests
    )


@pytest.mark.parametrize("count", [4_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "min_p": 0.02}],
    ids=["T=1", "filtered"],
)
def test_sampled_tree_decoding_fits_the_filtered_target_distribution(options: dict[str, float], count: int) -> None:
    """Test three distributions, with trees of topk 6: of the first token, of the first two tokens, and of all three
    tokens among the texts that begin with one of the four likeliest tokens.
    """
    target = target_folder(vocab_size=VOCAB, spread=0.3)
    settings = {"max_running_requests": 500, "max_total_tokens": 500 * 32, "page_size": 4}
    engine = build_engine(config_of(target, draft_folder(target), 6, 2, **settings))
    params = RequestParams(**options)  # type: ignore[arg-type]
    texts, accept_lens = [], []
    for start in range(0, count, 500):
        requests = [
            make_request(f"{seed}", PROMPT, params, seed=seed * 2_654_435_761, max_tokens=3, ignore_eos=True)
            for seed in range(start, start + 500)
        ]
        result = run(engine, requests)
        texts += [result.tokens[sent_request.request_id] for sent_request in requests]
        accept_lens += result.accept_lens
    sampled_tokens = np.array(texts)
    assert np.mean(accept_lens) > 1.1, "the engine hardly speculated"

    first_probabilities = next_token(target, PROMPT, options)
    assert fits(np.bincount(sampled_tokens[:, 0], minlength=VOCAB), first_probabilities, 3)
    pair_probabilities = np.zeros((VOCAB, VOCAB))
    for token in np.flatnonzero(first_probabilities):
        pair_probabilities[token] = first_probabilities[token] * next_token(target, [*PROMPT, int(token)], options)
    assert fits(
        np.bincount(sampled_tokens[:, 0] * VOCAB + sampled_tokens[:, 1], minlength=VOCAB**2),
        pair_probabilities.ravel(),
        3,
    )
    triple_probabilities, triple_ids = (
        np.zeros(VOCAB**3),
        sampled_tokens[:, 0] * VOCAB**2 + sampled_tokens[:, 1] * VOCAB + sampled_tokens[:, 2],
    )
    for a, b in product(np.argsort(first_probabilities)[-4:], range(VOCAB)):
        if pair_probabilities[a, b] > 0:
            offset = (int(a) * VOCAB + b) * VOCAB
            triple_probabilities[offset : offset + VOCAB] = pair_probabilities[a, b] * next_token(
                target, [*PROMPT, int(a), b], options
            )
    is_common = np.isin(sampled_tokens[:, 0], np.argsort(first_probabilities)[-4:])
    assert fits(
        np.bincount(triple_ids[is_common], minlength=VOCAB**3), triple_probabilities / triple_probabilities.sum(), 3
    )
