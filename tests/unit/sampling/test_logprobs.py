"""Log-probabilities of a row depend neither on the batch's other rows nor on the order in which a sort puts ties."""

from collections.abc import Iterator

import pytest
import torch

from cluster.models.vocab import ShardedLogits
from cluster.sampling.c_sampler import CSampler
from cluster.sampling.sampler import TOP_LOGPROBS, logprobs
from cluster.sampling.sampling_inputs import SamplerInput
from cluster.sampling.torch_sampler import TORCH, Sampler
from tests.unit.kernels.library import c_library


@pytest.fixture(params=["torch", "c"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return TORCH if request.param == "torch" else CSampler(c_library())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [300, 50_257])
def test_logprobs_of_a_row_are_independent_of_the_batch_size(sampler: Sampler, vocab: int) -> None:
    torch.manual_seed(vocab)
    columns, tokens = ShardedLogits(torch.randn(12, vocab), vocab), torch.randint(vocab, (12,))
    single_row = [logprobs(columns, torch.tensor([row]), tokens[row : row + 1], sampler) for row in range(12)]
    for count in (2, 3, 12):
        batch = logprobs(columns, torch.arange(count), tokens[:count], sampler)
        for row in range(count):
            assert torch.equal(batch.chosen[row], single_row[row].chosen[0])
            assert torch.equal(batch.values[row], single_row[row].values[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [1, 3, 40, 4000])
def test_tied_top_logprobs_are_ordered_by_token_id(sampler: Sampler, levels: int, dtype: torch.dtype) -> None:
    """So the first of the top tokens is the token that a greedy request gets."""
    torch.manual_seed(levels)
    values = (torch.randint(levels, (6, 5000)) / 16).to(dtype)
    result = logprobs(ShardedLogits(values, 5000), torch.arange(6), torch.zeros(6, dtype=torch.int64), sampler)
    expected_ids = values.sort(dim=1, descending=True, stable=True).indices[:, :TOP_LOGPROBS]
    assert torch.equal(result.ids, expected_ids)
    assert torch.equal(result.ids[:, 0], sampler.best(SamplerInput(values))[0])
