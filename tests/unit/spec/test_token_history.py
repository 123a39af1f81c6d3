"""Lookup of what followed the last tokens earlier in a text, against a search in plain Python; in torch and in C."""

from random import Random

import pytest
import torch

from cluster.engine.backends import lookup_of
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.torch_kernels import TorchKernels
from cluster.spec.token_history import LONGEST_MATCH, SHORTEST_MATCH, CLookup, Lookup, TokenHistory, TorchLookup
from tests.unit.kernels.library import c_library

WIDTH = 40


@pytest.fixture(params=["torch", "c"])
def lookup(request: pytest.FixtureRequest) -> Lookup:
    """Each implementation."""
    return TorchLookup() if request.param == "torch" else CLookup(c_library())


def expected_continuation(text: list[int], count: int) -> tuple[list[int], int]:
    """Return what `Lookup.continuations` must return for one text: the search as its docstring says it."""
    last = len(text) - 1
    found, best = last - 1, 0
    for position in range(last):
        length = 0
        while length < LONGEST_MATCH and length <= position and text[position - length] == text[last - length]:
            length += 1
        if length >= max(best, SHORTEST_MATCH):
            found, best = position, length
    if last == 0:
        return text * count, 0
    return [text[found + 1 + j % (last - found)] for j in range(count)], best


def history_of(texts: list[list[int]]) -> torch.Tensor:
    """Return a table whose row i + 1 has text i; what comes after a text must not matter."""
    table = torch.full((len(texts) + 2, WIDTH), 1, dtype=torch.int32)
    for row, text in enumerate(texts, start=1):
        table[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return table


@pytest.mark.parametrize("vocab", [1, 2, 3, 7])
def test_continuations_equal_a_search_in_python(lookup: Lookup, vocab: int) -> None:
    random = Random(vocab)
    texts = [[random.randrange(vocab) for _ in range(random.randint(1, WIDTH))] for _ in range(60)]
    for i in range(0, 60, 4):  # long repeats, longer than the longest match that counts
        text = [random.randrange(vocab) for _ in range(19)]
        texts[i] = (text + text)[: random.randint(20, 38)]
    rows, lasts = torch.arange(1, 61), torch.tensor([len(text) - 1 for text in texts])
    result = lookup.continuations(history_of(texts), rows, lasts, 6)
    expected = [expected_continuation(text, 6) for text in texts]
    assert [list(pair) for pair in zip(result.tokens.tolist(), result.matched.tolist(), strict=True)] == [
        list(pair) for pair in expected
    ]
    assert result.tokens.dtype == result.matched.dtype == torch.int64


def test_continuations_beyond_the_kept_positions_use_what_is_kept(lookup: Lookup) -> None:
    text = [3, 4, 5] * 20
    result = lookup.continuations(history_of([text[:WIDTH]]), torch.tensor([1]), torch.tensor([WIDTH + 7]), 3)
    assert (result.tokens[0].tolist(), int(result.matched)) == expected_continuation(text[:WIDTH], 3)


def test_append_writes_the_committed_tokens_only(lookup: Lookup) -> None:
    random = Random(5)
    texts = [[random.randrange(9) for _ in range(10)] for _ in range(5)]
    table = history_of(texts)
    expected = table.clone()
    tokens = torch.randint(9, (3, 4))
    rows, starts, lens = torch.tensor([4, 1, 2]), torch.tensor([10, 3, WIDTH - 2]), torch.tensor([2, 4, 3])
    lookup.append(table, rows, starts, tokens, lens)
    expected[4, 10:12], expected[1, 3:7] = tokens[0, :2].int(), tokens[1].int()
    expected[2, WIDTH - 2 :] = tokens[2, :2].int()  # the third token has no place
    assert torch.equal(table, expected)


def test_idle_rows_may_occur_several_times(lookup: Lookup) -> None:
    table = history_of([[5, 6, 7]])
    rows, zeros = torch.tensor([2, 2, 2]), torch.zeros(3, dtype=torch.int64)
    lookup.append(table, rows, zeros, torch.tensor([[1], [2], [3]]), zeros)
    result = lookup.continuations(table, rows, zeros, 2)
    assert result.tokens.tolist() == [[1, 1]] * 3 and result.matched.tolist() == [0, 0, 0]
    assert table[1, :3].tolist() == [5, 6, 7]


def test_lookup_of_each_backend() -> None:
    assert isinstance(lookup_of(TorchKernels()), TorchLookup)
    assert isinstance(lookup_of(CKernels(c_library())), CLookup)


def test_request_longer_than_the_kept_positions_has_no_match(lookup: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last tokens are not kept, so those that are kept say nothing about what follows."""
    monkeypatch.setattr("cluster.spec.token_history.MAX_POSITIONS", 8)
    history = TokenHistory(2, 20, lookup, torch.device("cpu"))
    rows, starts = torch.tensor([0, 1]), torch.tensor([0, 0])
    history.append(rows, starts, torch.tensor([[5, 6] * 6, [5, 6] * 6]), torch.tensor([7, 12]))
    assert history.continuations(rows, torch.tensor([6, 11]), 2).matched.tolist() == [5, 0]
