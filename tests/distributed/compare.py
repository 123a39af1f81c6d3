"""Compares a gang with a single rank: the same requests must get the same tokens, from the same trees, with the same
accept lengths.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from tests.distributed.gang import Action, Case, RankProcesses, RankReport
from tests.distributed.worker import run

MESH_SETTINGS = (
    *("tp_size", "attn_dp_size", "dp_padding", "vocab_parallel", "speculative_draft_parallel", "debug_lockstep"),
    *("capture", "capture_sizes", "ep_size"),
)
"""Settings of a gang that the single rank must not have."""
SINGLE_RANK_SETTINGS = {
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "capture": "off",
    "speculative_mode": "fixed",
}
"""Settings of the single rank: it has enough memory for all requests, captures nothing, and has fixed trees."""


@dataclass
class Tally:
    """What one or more cases compared and exercised, as sums.

    `compared_requests`: requests whose tokens were all compared. `compared_trees`: those of them whose trees and accept
    lengths were compared too. `returned_trees`: trees that these requests returned. `aborted_requests`: requests of
    which only a prefix was compared. `compared_prompt_logprobs`: requests whose prompt log-probabilities were compared.
    `retractions`: how often a request was retracted. `padding_rows`: rows of padding.
    `uneven_steps`: steps in which ranks had different numbers of rows. `idle_rank_steps`: pairs of a rank without rows
    and a step in which another rank had rows. `replayed_steps`: steps that replayed a captured program, over all ranks.
    `trees_by_accept_length[j]`: trees of which j draft tokens were accepted.
    """

    compared_requests: int = 0
    compared_prompt_logprobs: int = 0
    compared_trees: int = 0
    returned_trees: int = 0
    aborted_requests: int = 0
    retractions: int = 0
    padding_rows: int = 0
    steps: int = 0
    uneven_steps: int = 0
    idle_rank_steps: int = 0
    replayed_steps: int = 0
    trees_by_accept_length: Counter[int] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Tally") -> "Tally":
        for field_name, value in vars(other).items():
            setattr(self, field_name, getattr(self, field_name) + value)
        return self


def check(processes: RankProcesses, case: Case, same_trees: bool = True, timeout_s: float = 240.0) -> Tally:
    """Run the case on its gang and on a single rank; return the tally of the comparison.

    `same_trees`: trees and accept lengths must agree as well. `timeout_s` is the time that the gang may take.
    """
    reports = processes.run_without_failure(case, timeout_s)
    single_rank = run_single_rank(
        json.dumps(single_rank_config(case.config), sort_keys=True), tuple(map(action_json, case.actions))
    )
    tally = Tally(steps=len(reports[0].rows))
    tokens, ends_by_request, retracted = join_reports(reports)
    tree_checksums = {
        request_id: trees_of_request
        for report in reports
        for request_id, trees_of_request in report.tree_checksums.items()
    }
    returned_trees = {
        request_id: trees_of_request
        for report in reports
        for request_id, trees_of_request in report.returned_trees.items()
    }
    for action in case.actions:
        if action.kind == "abort":
            continue
        request_id = action.request["request_id"]
        request_tokens, expected_tokens = tokens.get(request_id, []), single_rank.tokens[request_id]
        if request_id not in ends_by_request:
            tally.aborted_requests += 1
            if request_tokens != expected_tokens[: len(request_tokens)]:
                tally.mismatches.append(f"{request_id}, aborted: {request_tokens} is no prefix of {expected_tokens}")
            continue
        (finish_reason, accept_histogram), (expected_reason, expected_histogram) = (
            ends_by_request[request_id],
            single_rank.ended[request_id],
        )
        tally.compared_requests += 1
        if (request_tokens, finish_reason) != (expected_tokens, expected_reason):
            tally.mismatches.append(
                f"{request_id}: {request_tokens} {finish_reason} instead of {expected_tokens} {expected_reason}"
            )
        prompt_logprobs = [logprob for report in reports for logprob in report.prompt_logprobs.get(request_id, [])]
        tally.compared_prompt_logprobs += bool(prompt_logprobs)
        if not same_logprobs(prompt_logprobs, single_rank.prompt_logprobs.get(request_id, [])):
            tally.mismatches.append(
                f"{request_id}: prompt logprobs {prompt_logprobs} "
                f"instead of {single_rank.prompt_logprobs.get(request_id)}"
            )
        token_logprobs = [
            logprob_entry for report in reports for logprob_entry in report.token_logprobs.get(request_id, [])
        ]
        if not same_logprobs(token_logprobs, single_rank.token_logprobs.get(request_id, [])):
            tally.mismatches.append(
                f"{request_id}: log-probabilities {token_logprobs} "
                f"instead of {single_rank.token_logprobs.get(request_id)}"
            )
        if request_id in retracted or not same_trees:
            continue
        tally.compared_trees += 1
        tally.returned_trees += len(returned_trees.get(request_id, ()))
        tally.trees_by_accept_length += Counter(dict(enumerate(accept_histogram or [])))
        if accept_histogram != expected_histogram:
            tally.mismatches.append(f"{request_id}: accept lengths {accept_histogram} instead of {expected_histogram}")
        elif json.dumps(returned_trees.get(request_id)) != json.dumps(single_rank.returned_trees.get(request_id)):
            tally.mismatches.append(
                f"{request_id}: other returned trees, of the same accept lengths {accept_histogram}"
            )
        # A replay runs no Python code of the draft, so there are no checksums of its trees.
        elif (
            tree_checksums.get(request_id) != single_rank.tree_checksums.get(request_id)
            and case.config.get("capture") != "on"
        ):
            tally.mismatches.append(f"{request_id}: other trees, of the same accept lengths {accept_histogram}")
    tally_reports(tally, reports, case)
    return tally


def same_logprobs(actual: list[list[Any]], expected: list[list[Any]]) -> bool:
    """Whether the tokens are the same and their log-probabilities too, within 1e-9: a gang adds its sums in another
    order.
    """

    def tokens_and_ranks(entries: list[list[Any]]) -> list[Any]:
        return [(token, rank, [top_token for top_token, _ in top]) for token, _, rank, top in entries]

    if tokens_and_ranks(actual) != tokens_and_ranks(expected):
        return False
    values = ([x for _, own, _, top in entries for x in (own, *(p for _, p in top))] for entries in (actual, expected))
    return all(abs(a - b) < 1e-9 for a, b in zip(*values, strict=True))


def tally_reports(tally: Tally, reports: list[RankReport], case: Case) -> None:
    """Add what the ranks exercised to the tally. Check what must hold after every run: the ranks' logs of collectives
    agree, and no page is in use.
    """
    attn_tp = case.world_size // int(case.config.get("attn_dp_size", 1))
    assert_logs_agree(reports, attn_tp)
    leaders = reports[::attn_tp]
    tally.retractions += sum(len(report.retractions) for report in leaders)
    tally.padding_rows += sum(report.padding_rows for report in leaders)
    tally.replayed_steps += sum(report.replayed_steps for report in leaders)
    for rows in zip(*(report.rows for report in leaders), strict=True):
        tally.uneven_steps += len(set(rows)) > 1
        tally.idle_rank_steps += sum(n == 0 for n in rows) if any(rows) else 0
    pages_in_use = [report.pages_used for report in leaders]
    if any(pages_in_use):
        tally.mismatches.append(f"pages still in use: {pages_in_use}")


def assert_logs_agree(reports: list[RankReport], attn_tp: int) -> None:
    """Assert that all ranks entered the same collectives over the world, and all ranks of an attention group the same
    collectives over the group.
    """
    for rank, report in enumerate(reports):
        assert report.world_log == reports[0].world_log, (
            f"rank {rank} {report.world_log}, rank 0 {reports[0].world_log}"
        )
        leader = reports[rank // attn_tp * attn_tp]
        assert report.attn_log == leader.attn_log, f"rank {rank} {report.attn_log}, its leader {leader.attn_log}"
        assert len(report.rows) == len(reports[0].rows), "ranks took different numbers of steps"
    if len(reports) > 1:
        assert reports[0].world_log[0] > len(reports[0].rows), "no collective was logged"


def join_reports(
    reports: list[RankReport],
) -> tuple[dict[str, list[int]], dict[str, tuple[str, list[int] | None]], set[str]]:
    """The tokens and the ends of all ranks' requests, by request, and the requests that any rank retracted."""
    tokens = {request_id: ids for report in reports for request_id, ids in report.tokens.items()}
    ends_by_request = {request_id: end for report in reports for request_id, end in report.ended.items()}
    return tokens, ends_by_request, {request_id for report in reports for request_id in report.retractions}


def single_rank_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a gang, changed to the config of a single rank."""
    return {name: value for name, value in config.items() if name not in MESH_SETTINGS} | SINGLE_RANK_SETTINGS


def action_json(action: Action) -> str:
    """The action as JSON, which can be a key of a cache."""
    return json.dumps(asdict(action), sort_keys=True)


@cache
def run_single_rank(config: str, actions: tuple[str, ...]) -> RankReport:
    """Run the same requests on a single rank, with enough memory for all of them and without aborts; return its report.

    `config` and each action are JSON, so that the result can be cached.
    """
    all_actions = [Action(**json.loads(action)) for action in actions]
    submits = [replace(action, dp_rank=0) for action in all_actions if action.kind == "submit"]
    case = Case(json.loads(config), submits)
    report = run(json.loads(json.dumps(asdict(case))))
    assert not report.retractions, "the single rank must not retract a request"
    return report
