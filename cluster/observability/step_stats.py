"""The statistics of one step of one rank, from which its metrics are filled."""

from dataclasses import dataclass, field

from cluster.status import EngineStatus

REPLAY = "replay"
DEVICE_PHASES = ("draft", "target", "extend")  # phases of a step that runs eagerly; a replay is one phase
PHASES = ("schedule", "agree", *DEVICE_PHASES, REPLAY, "commit")
UNDRAFTED = ("cost", "limit", "waking")
"""Why a step that decodes drafts nothing: every tree costs more than it brings; `speculative_batch_tiers` or the limits
of requests allow none; or a draft that has rested first reads what it has missed.
"""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one step of one rank, in plain values. The engine makes a `StepStats` for each step.

    Counts and seconds are those of this step; `EngineMetrics` adds them up. `forward_seconds` is the time inside model
    forwards, including waits for peers, and 0 in a replayed step. `status` is the state after the step and replaces the
    previous one. `accept_lens` has the number of tokens, bonus included, for each request that verified a tree.
    `accepted_by_depth[i]` counts the requests whose accepted path reached depth i + 1, so its sum is the number of
    accepted draft tokens. `eager_fallbacks` is 1 if the step ran eagerly because a check before capture or replay
    failed. `tree` is the `label` of the trees, if a request decoded. `expected_tokens` are the tokens that
    adaptive trees were expected to give, bonus included. `explored` is 1 if the step had its tree only to learn
    what the tree gives, `woken` if a draft that had rested read what it had missed. `forced_nodes` are those of the
    `verified_nodes` that a grammar forced. `looked_up_tokens` are the accepted nodes that were looked up, without those
    that the draft proposed too. If the step decoded and could have drafted but did not, `undrafted` is the
    reason, one of `UNDRAFTED`.
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
        """The seconds of the phases on the device: draft, target and extend of a step that ran eagerly, or replay alone
        of a step that was replayed as one captured program.
        """
        return {name: self.phase_seconds[name] for name in (*DEVICE_PHASES, REPLAY) if name in self.phase_seconds}

    @property
    def replayed(self) -> bool:
        """Whether the step was replayed as one captured program. Its device phases cannot be distinguished."""
        return REPLAY in self.phase_seconds
