"""One gathered table of facts -> one plan, the same on every rank because the function is pure (law 2)."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple


class Facts(NamedTuple):
    """One rank's row: a header that all ranks must agree on (`epoch`, `step`, `digest` of the last plan), then sizes.

    `decodes` requests decode, `prompt_rows` prompt rows ride along, `num_steps` is the deepest tree the rank can draft.
    """

    epoch: int
    step: int
    digest: int
    decodes: int
    prompt_rows: int
    num_steps: int


class StepPlan(NamedTuple):
    """What every rank runs: `decodes[i]` and `prompt_rows[i]` of rank i, padded; the tier; and its digest."""

    step: int
    decodes: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    padded_decodes: int
    padded_prompt_rows: int
    num_steps: int

    @property
    def digest(self) -> int:
        """A checksum that the next step's header carries."""
        return zlib.crc32(repr(tuple(self)).encode())


def make_plan(table: Sequence[Facts]) -> StepPlan:
    """The plan that follows from the facts of all ranks: rows padded to the maximum, the tier their minimum."""
    decodes, prompt_rows = tuple(f.decodes for f in table), tuple(f.prompt_rows for f in table)
    return StepPlan(
        step=table[0].step,
        decodes=decodes,
        prompt_rows=prompt_rows,
        padded_decodes=max(decodes),
        padded_prompt_rows=max(prompt_rows),
        num_steps=min(f.num_steps for f in table),
    )
