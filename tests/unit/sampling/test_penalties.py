"""The bad words table is only as large as the current requests need."""

import torch

from cluster.batch import RowPenalties, RowSampling, StepInput
from cluster.device.staging import Staging
from cluster.sampling.penalties import PenaltyTable

BadWords = tuple[tuple[int, ...], ...]


def admit(table: PenaltyTable, row: int, bad_words: BadWords | None, tokens: tuple[int, ...] = (3, 4, 5)) -> None:
    """Admit a request in `row` of the table. If `bad_words` is None, the request has no penalties."""
    penalties = () if bad_words is None else (RowPenalties(row, 0.0, 0.0, 1.0, 0, 3, tokens, (), (), None, bad_words),)
    step_input = StepInput(samplings=(RowSampling(row, 1.0, 0, 1.0, 0.0, 0),), penalties=penalties)
    staging = Staging(torch.device("cpu"))
    table.stage(step_input, staging)
    table.put(step_input, staging.send().lists())


def test_bad_words_table_shrinks_when_requests_with_many_words_leave() -> None:
    """Every step with a bad word compares the complete table, so one request must not enlarge it permanently."""
    table = PenaltyTable(4, 16, torch.float32, torch.device("cpu"))
    table.allocate()
    admit(table, 0, ((6,), (7, 8)))
    admit(table, 1, tuple((9,) * 5 for _ in range(30)))
    assert table.bad_words.shape == (4, 30, 5) and table.recent_tokens.shape == (4, 4)
    assert table.bad_words[0, :2].tolist() == [[-1] * 4 + [6], [-1] * 3 + [7, 8]]
    admit(table, 1, None)
    admit(table, 2, ((2,),))
    assert table.bad_words.shape == (4, 2, 2) and table.recent_tokens.shape == (4, 1)
    assert table.bad_words[0].tolist() == [[-1, 6], [7, 8]] and table.bad_words[2].tolist() == [[-1, 2], [-1, -1]]
    assert table.bad_words[1].tolist() == [[-1, -1], [-1, -1]] and table.recent_tokens[0].tolist() == [5]
    admit(table, 0, None)
    admit(table, 3, ((1,),))
    assert table.bad_words.shape == (4, 1, 1) and table.bad_words[2].tolist() == [[2]]


def test_repetition_penalty_changes_only_tokens_of_the_prompt_and_the_output() -> None:
    """Stop tokens have a flag for `min_tokens`; this flag does not make them repeated."""
    table = PenaltyTable(2, 8, torch.float32, torch.device("cpu"))
    table.allocate()
    penalties = (RowPenalties(0, 0.0, 0.0, 2.0, 0, 1, (3, 4), (6,), (), None, ()),)
    step_input = StepInput(samplings=(RowSampling(0, 1.0, 0, 1.0, 0.0, 0),), penalties=penalties)
    staging = Staging(torch.device("cpu"))
    table.stage(step_input, staging)
    table.put(step_input, staging.send().lists())
    no_path = torch.full((1, 1, 0), -1)
    adjusted = table.apply(torch.full((1, 1, 8), 8.0), torch.tensor([0]), no_path, None, any_bad_words=False)
    assert adjusted[0, 0].tolist() == [8.0, 8.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0]
