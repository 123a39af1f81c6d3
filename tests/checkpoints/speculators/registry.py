"""The registry of the drafts in this folder, which model classes of the library `speculators` wrote.

`make.py` writes the drafts, `tests/checkpoints/test_speculators.py` tests them, and docs/models.md lists them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Fixture:
    """One EAGLE-3 draft of `speculators`.

    `what` describes the draft in docs/models.md. `flags` are flags of its config. `shape` holds config values of its
    decoder layers. A `vocab` of 64 is the vocabulary of the target; such a draft has no token map. If `window` is set,
    `full_attention_layers` are the layers without a sliding window.
    """

    what: str
    arch: str = "llama"
    layers: int = 1
    boundaries: tuple[int, ...] = (1, 2, 4)
    vocab: int = 40
    flags: dict[str, bool] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    full_attention_layers: tuple[int, ...] = (0, 1, 2)


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FIXTURES = {
    "llama": Fixture("speculators, Llama layer, all flags off"),
    "residual": Fixture(
        "speculators, norm_before_residual, whole vocabulary", vocab=64, flags={"norm_before_residual": True}
    ),
    "before-fc": Fixture(
        "speculators, norm_before_fc, five aux hidden states",
        boundaries=(0, 1, 2, 3, 4),
        flags={"norm_before_fc": True},
    ),
    "fc-norm": Fixture(
        "speculators, fc_norm, two layers", layers=2, flags={"fc_norm": True, "norm_before_residual": True}
    ),
    "norm-output": Fixture(
        "speculators, fc_norm and norm_output (EAGLE-3.1)", flags={"fc_norm": True, "norm_output": True}
    ),
    "one-aux": Fixture(
        "speculators, one aux hidden state, norm_before_fc, norm_output, norm_before_residual",
        boundaries=(3,),
        flags={"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
    ),
    "biases": Fixture(
        "speculators, biases, llama3 rope", shape={"attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE}
    ),
    "qwen3": Fixture(
        "speculators, Qwen3 layer, heads of 12",
        arch="qwen3",
        flags={"norm_before_residual": True},
        shape={"head_dim": 12},
    ),
    "windows": Fixture(
        "speculators, three Qwen3 layers, the second through a window",
        arch="qwen3",
        layers=3,
        flags={"norm_output": True},
        window=4,
        full_attention_layers=(0, 2),
    ),
    "llama-window": Fixture(
        "speculators, Llama layer through a window (what its trainer makes by default)",
        window=4,
        full_attention_layers=(),
    ),
}

EAGLE1 = {
    "eagle1": "fc with bias, read by speculators' converter",
    "eagle1-no-bias": "fc without bias, read by speculators' converter",
}


def rows() -> list[tuple[str, str, str]]:
    """Return the rows for docs/models.md: the family, the dialect, and the implementation that gave the numbers."""
    eagle3_rows = [("EAGLE-3", fixture.what, "speculators 0.9.0's own class, float64") for fixture in FIXTURES.values()]
    mtp_row = ("MTP", "embedding first, under DeepSeek's names", "speculators 0.9.0's own class, float64")
    return [*eagle3_rows, mtp_row] + [
        ("EAGLE-1/2", what, "speculators 0.4.0's own class, float64") for what in EAGLE1.values()
    ]
