"""Compares answers token by token, and judges each difference by how near the two tokens are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.bench.report import first_difference

NEAR = 1e-3  # logits: float32 errs by up to some 1e-4 here, in any order of its sums; see `Difference.near`

INVALID = "\ufffd"

Gap = Callable[[Sequence[int], int | None, int | None], float]
"""Of a context and two tokens that follow it: the logit of the first less that of the second, in float64. A token is
None where the answer ended."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the reference: the prompt's name, the index of the token, both tokens, and the gap: the
    logit of the reference's token less that of ours, in float64. A negative gap says that ours is right.
    """

    prompt: str
    at: int
    reference: int | None
    ours: int | None
    gap: float

    @property
    def near(self) -> bool:
        """Whether float32 cannot tell which of the two tokens is likelier, so that neither answer is wrong."""
        return abs(self.gap) < NEAR


def differences(
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    gap: Gap,
) -> list[Difference]:
    """The first difference of each answer that is not the reference's."""
    found = []
    for name, prompt, right, own in zip(names, prompts, reference, ours, strict=True):
        at = first_difference(right, own)
        if at is None:
            continue
        first, second = (side[at] if at < len(side) else None for side in (right, own))
        found.append(Difference(name, at, first, second, gap([*prompt, *right[:at]], first, second)))
    return found


def compared(
    names: Sequence[str], reference: Mapping[str, Any], engine: Mapping[str, Any], served: Mapping[str, Any], gap: Gap
) -> dict[str, Any]:
    """All comparisons of the answers of `answers.by_transformers`, `by_engine` and `by_server`; JSON-ready.

    `rows` compare greedy tokens with those of `transformers` at batch 1, `transformers` at batch 16 among them as a
    yardstick. `problems` are the other things that must hold and do not.
    """
    prompts, right = reference["prompts"], reference["greedy"]["1"]
    contenders = {
        "aerie, batch 1": engine["greedy"]["1"],
        "aerie, batch 16": engine["greedy"]["16"],
        "aerie serve, 16 streams": served["greedy"],
        "transformers, batch 16": reference["greedy"]["16"],
    }
    rows = []
    for who, answers in contenders.items():
        found = differences(names, prompts, right, answers, gap)
        rows.append(
            {
                "who": who,
                "same": len(names) - len(found),
                "of": len(names),
                "near_ties": sum(one.near for one in found),
                "differences": [asdict(one) for one in found],
            }
        )
    return {"rows": rows, "problems": problems(names, reference, engine, served)}


def problems(
    names: Sequence[str], reference: Mapping[str, Any], engine: Mapping[str, Any], served: Mapping[str, Any]
) -> list[str]:
    """What must hold beside equal greedy tokens: the same ids of each prompt, the same sampled tokens with and without
    a server, and streamed pieces that join to the text that `transformers` decodes. Where an answer holds bytes that
    are no UTF-8, `transformers` loses whole characters beside them, so such a text is no reference.
    """
    found = []
    for at, name in enumerate(names):
        if engine["prompts"][at] != reference["prompts"][at]:
            found.append(f"{name}: the prompt has other ids")
        if engine["sampled"][at] != served["sampled"][at]:
            found.append(f"{name}: the same seed gives other tokens over REST than without a server")
        same = served["greedy"][at] == reference["greedy"]["1"][at]
        if same and INVALID not in reference["texts"][at] and served["greedy_texts"][at] != reference["texts"][at]:
            found.append(f"{name}: {served['greedy_texts'][at]!r} was streamed, not {reference['texts'][at]!r}")
    return found
