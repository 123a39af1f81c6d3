"""The statistics of one step of one rank, from which its metrics are filled."""

from dataclasses import dataclass, field

from cluster.status import EngineStatus

REPLAY = "replay"
DEVICE_PHASES = ("draft", "target", "extend")  # phases on the device of a step that runs eagerly; a replay is one phase
PHASES = ("schedule", "agree", *DEVICE_PHASES, REPLAY, "commit")
UNDRAFTED = ("cost", "limit", "waking")
"""Why a step that decodes drafts nothing. `cost`: every tree costs more time than it saves. `limit`:
`speculative_batch_tiers` or the limits of requests allow no tree. `waking`: the draft has rested (not read the tokens
of steps without trees) and first reads the tokens that it has missed.
"""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one step of one rank, in plain values. The engine makes a `StepStats` for each step.

    Counts and seconds are those of this step; `EngineMetrics` adds them up. `forward_seconds` is the time inside model
    forwards, including waits for peers, and 0 in a replayed step. `status` is the state after the step and replaces the
    previous one. `accept_lens` has the number of tokens, bonus included, for each request that verified a tree.
    `accepted_by_depth[i]` counts the requests whose accepted path reached depth i + 1, so the sum of the list is the
    number of accepted draft tokens. `eager_fallbacks` is 1 if the step ran eagerly because a check before capture or
    replay failed.

    `tree` is the `TreeShape.label` of the step's trees, or None if no request decoded. `expected_tokens` is the number
    of tokens that the trees were expected to give, bonus included; it is 0.0 without adaptive trees, in a step without
    a tree, and in a step with nodes for tokens that a grammar forces. `explored` is 1 if the step had its tree only to
    learn how many tokens the tree gives. `woken` is 1 if the draft had rested (not read the tokens of steps without
    trees) and read the missed tokens in this step. `forced_nodes` counts those of the `verified_nodes` that hold tokens
    that a grammar forced. `looked_up_tokens` counts the accepted nodes with tokens found earlier in the text of the
    request, without those that the draft proposed too. If the step decoded and could have drafted but did not,
    `undrafted` is the reason, one of `UNDRAFTED`; otherwise it is None.
    """

    phase_seconds: dict[str, float] = field(default_factory=dict)
    waited_seconds: float = 0.0
    own_seconds: float = 0.0
    forward_seconds: float = 0.0
    decode_requests: int = 0
    prompt_rows: int = 0
    padded_rows: int = 0
    target_rows: int = 0
    accept_lens: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafts: int = 0
    verified_nodes: int = 0
    committed_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    admitted: int = 0
    retracted: int = 0
    nonfinite: int = 0
    eager_fallbacks: int = 0
    tree: tuple[int, int, int] | None = None
    expected_tokens: float = 0.0
    explored: int = 0
    woken: int = 0
    forced_nodes: int = 0
    looked_up_tokens: int = 0
    undrafted: str | None = None
    rank: int = 0
    status: EngineStatus = field(default_factory=EngineStatus)

    @property
    def device_phases(self) -> dict[str, float]:
        """The seconds of each phase on the device. A step that ran eagerly has the phases draft, target and extend; a
        step that was replayed as one captured program has only the phase replay.
        """
        return {name: self.phase_seconds[name] for name in (*DEVICE_PHASES, REPLAY) if name in self.phase_seconds}

    @property
    def replayed(self) -> bool:
        """Whether the step was replayed as one captured program. Draft, target and extend then have no own times."""
        return REPLAY in self.phase_seconds
