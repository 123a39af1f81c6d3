"""What is written here by other people's model classes, as plain values: `make.py` writes it, the test next door reads
it, docs/models.md lists it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Fixture:
    """One EAGLE-3 draft of `speculators`. `flags` are those of its config, `shape` keys of its decoder layers.

    `vocab` 64 is the target's, so there is no map; `full` are the layers without a window, where `window` is set.
    """

    what: str
    arch: str = "llama"
    layers: int = 1
    boundaries: tuple[int, ...] = (1, 2, 4)
    vocab: int = 40
    flags: dict[str, bool] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    full: tuple[int, ...] = (0, 1, 2)


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
        full=(0, 2),
    ),
    "llama-window": Fixture(
        "speculators, Llama layer through a window (what its trainer makes by default)", window=4, full=()
    ),
}

EAGLE1 = {
    "eagle1": "fc with bias, read by speculators' converter",
    "eagle1-no-bias": "fc without bias, read by speculators' converter",
}


def rows() -> list[tuple[str, str, str]]:
    """Family, dialect, and what it was checked against: the rows of docs/models.md."""
    newer = [("EAGLE-3", made.what, "speculators 0.9.0's own class, float64") for made in FIXTURES.values()]
    mtp = ("MTP", "embedding first, under DeepSeek's names", "speculators 0.9.0's own class, float64")
    return [*newer, mtp] + [("EAGLE-1/2", what, "speculators 0.4.0's own class, float64") for what in EAGLE1.values()]
