"""Compare answers token by token, and judge each difference by the logits of the two tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.bench.report import first_difference

NEAR_TIE = 1e-3  # logits that differ by less are a near-tie: rounding errors of float32 reach about 1e-4

REPLACEMENT_CHARACTER = "\ufffd"

LogitGap = Callable[[Sequence[int], int | None, int | None], float]
"""A function that takes a context and two possible next tokens. It returns the logit of the first token minus the logit
of the second, in float64. The token None means that the answer ended.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of an answer from the reference: the prompt's name, the index of the token, and both tokens.
    `gap` is the logit of the reference's token minus the logit of our token, in float64. If it is negative, our token
    is the right one.
    """

    prompt: str
    at: int
    reference: int | None
    ours: int | None
    gap: float

    @property
    def near(self) -> bool:
        """Whether the two tokens are so close that float32 cannot tell which is likelier; then neither is wrong."""
        return abs(self.gap) < NEAR_TIE


def differences(
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    gap: LogitGap,
) -> list[Difference]:
    """Return the first difference of each answer that differs from the reference."""
    difference_list = []
    for name, prompt, expected, answer in zip(names, prompts, reference, ours, strict=True):
        index = first_difference(expected, answer)
        if index is None:
            continue
        reference_token, our_token = (tokens[index] if index < len(tokens) else None for tokens in (expected, answer))
        difference_list.append(
            Difference(
                name, index, reference_token, our_token, gap([*prompt, *expected[:index]], reference_token, our_token)
            )
        )
    return difference_list


def compare_answers(
    names: Sequence[str],
    reference: Mapping[str, Any],
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
    gap: LogitGap,
) -> dict[str, Any]:
    """Return all comparisons of the answers of `by_transformers`, `by_engine` and `by_server`, JSON-ready.

    Each of `rows` compares a contender's greedy tokens with the tokens of `transformers` at batch 1. One contender is
    `transformers` itself at batch 16, as a yardstick. `problems` is the result of the function `problems`.
    """
    prompts, expected = reference["prompts"], reference["greedy"]["1"]
    contenders = {
        "aerie, batch 1": engine["greedy"]["1"],
        "aerie, batch 16": engine["greedy"]["16"],
        "aerie serve, 16 streams": server["greedy"],
        "transformers, batch 16": reference["greedy"]["16"],
    }
    rows = []
    for contender, answers in contenders.items():
        answer_differences = differences(names, prompts, expected, answers, gap)
        rows.append(
            {
                "who": contender,
                "same": len(names) - len(answer_differences),
                "of": len(names),
                "near_ties": sum(difference.near for difference in answer_differences),
                "differences": [asdict(difference) for difference in answer_differences],
            }
        )
    return {"rows": rows, "problems": problems(names, reference, engine, server)}


def problems(
    names: Sequence[str], reference: Mapping[str, Any], engine: Mapping[str, Any], server: Mapping[str, Any]
) -> list[str]:
    """Return which of these conditions do not hold: each prompt has the same ids, sampled tokens are the same with and
    without a server, and the streamed text equals the text that `transformers` decodes. Texts with invalid UTF-8 are
    not compared, because `transformers` then also loses the characters next to the invalid bytes.
    """
    problem_list = []
    for index, name in enumerate(names):
        if engine["prompts"][index] != reference["prompts"][index]:
            problem_list.append(f"{name}: the prompt has other ids")
        if engine["sampled"][index] != server["sampled"][index]:
            problem_list.append(f"{name}: the same seed gives other tokens over REST than without a server")
        same_tokens = server["greedy"][index] == reference["greedy"]["1"][index]
        if (
            same_tokens
            and REPLACEMENT_CHARACTER not in reference["texts"][index]
            and server["greedy_texts"][index] != reference["texts"][index]
        ):
            problem_list.append(
                f"{name}: {server['greedy_texts'][index]!r} was streamed, not {reference['texts'][index]!r}"
            )
    return problem_list
