"""The facts: what each rank tells all others before a step. From them all ranks compute the same plan of the step."""

from typing import NamedTuple

from cluster.dp_attention.tree_times import NOT_MEASURED, MeasuredStep

NO_TIER = -1
"""In place of the number of a tier: no tier."""


class RankFacts(NamedTuple):
    """What one rank tells all others. The fields, in no particular order, are of three kinds:

    - Equal on all ranks (`HEADER`): `epoch` counts the restarts of the gang (the ranks of a replica), `step` its steps.
      `digest` is that of the last plan. `calls` counts the collectives of the rank so far. `rule_checksum` covers
      everything else that determines plans and scripts, `captured` is a checksum of the keys of captured programs.
    - Equal within an attention group (`GROUP_HEADER`): `step_input_checksum` and `results_checksum`, of the last step
      input and of the last results that were read. Both stay 0 if a group has one rank.
    - The rank's own. `decodes`, `prompt_rows`, `finishing_prompts` and `scored` are the numbers of decoding requests,
      of prompt rows, of prompts that finish, and of prompt rows that return log-probabilities. `step_input_len` is the
      number of integers in the packed step input, and `mode` is the sampling mode of the step input. `requests` counts
      waiting and running requests. `decode_us` is `Schedule.decode_us`: the predicted time of decoding in microseconds
      or, if no times are predicted, the number of decoding requests. A nonzero `leaving` asks to end the gang.
      `context` is the mean number of committed tokens of the decoding requests, as far as the host knows.
      `capture_us` is `Programs.capture_us`. `max_tier`, `prompt_us`, `explores`, `outlook` and the six fields of a
      measured step are those of `TreeVote`.

    Of the rank's own fields, only `requests` and `leaving` count on all ranks. `capture_us` and the measured step count
    only on rank 0, the others on the first rank of each group (its leader).
    """

    epoch: int
    step: int
    digest: int
    calls: int
    decodes: int = 0
    prompt_rows: int = 0
    finishing_prompts: int = 0
    step_input_len: int = 0
    max_tier: int = 0
    requests: int = 0
    leaving: int = 0
    rule_checksum: int = 0
    step_input_checksum: int = 0
    results_checksum: int = 0
    decode_us: int = 0
    mode: int = 0
    captured: int = 0
    scored: int = 0
    prompt_us: int = 0
    explores: int = NO_TIER
    measured_tier: int = 0
    measured_decodes: int = 0
    measured_us: int = 0
    measured_context: int = 0
    measured_overhead_us: int = 0
    measured_steps: int = 0
    context: int = 0
    capture_us: int = 0
    outlook: tuple[int, ...] = ()

    def to_row(self) -> tuple[int, ...]:
        """Return the facts as one row of integers."""
        return (*self[:-1], *self.outlook)  # `outlook` is the last field, and the only tuple

    @classmethod
    def from_row(cls, row: tuple[int, ...]) -> "RankFacts":
        """Return the facts from what `to_row` returned."""
        count = len(cls._fields) - 1
        return cls._make((*row[:count], row[count:]))


class TreeVote(NamedTuple):
    """What an attention group contributes to the choice of the tree of a step.

    Tiers are the tree shapes that a step may use, by number. The step uses no tier beyond `max_tier`. The other fields
    matter only if trees are adaptive. `outlook` are the tokens that the decoding requests of the group are expected to
    get in the step, by tier, in thousandths of a token; it is empty on ranks that do not lead their group. `prompt_us`
    is the predicted time of the prompt rows of the group in microseconds. If `explores` is not `NO_TIER`, the group
    asks for the tier `explores`, to learn how many tokens it gives, or how long it takes. `measured` is the
    mean time of steps that the rank has not told the others about yet. Only typical steps count
    (`ObservedStep.is_typical`).
    """

    max_tier: int
    outlook: tuple[int, ...] = ()
    prompt_us: int = 0
    explores: int = NO_TIER
    measured: MeasuredStep = NOT_MEASURED


NO_TREES = TreeVote(max_tier=0)

HEADER = ("epoch", "step", "digest", "calls", "rule_checksum", "captured")
GROUP_HEADER = ("step_input_checksum", "results_checksum")
