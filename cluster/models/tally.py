"""Counts a checkpoint's quantised weights: how many stay packed, and how many were dequantised on load."""

from collections import Counter
from dataclasses import dataclass, field

from cluster.kernels.interface import Stack, Weight
from cluster.kernels.quantised import Quantised


@dataclass(slots=True)
class QuantisationTally:
    """Counts packed and dequantised weights by kind. All packed weights hold `num_values` values in `nbytes` bytes."""

    packed: Counter[str] = field(default_factory=Counter)
    dequantised: Counter[str] = field(default_factory=Counter)
    num_values: int = 0
    nbytes: int = 0

    def count_packed(self, matrix: Quantised, weight: Weight | Stack, count: int = 1) -> None:
        """Count `count` matrices of the kind and shape of `matrix`, which stay packed; `weight` holds all of them."""
        self.packed[matrix.description] += count
        outputs, inputs = matrix.shape
        self.num_values += count * outputs * inputs
        self.nbytes += weight.nbytes

    def summary_lines(self, activations: bool) -> list[str]:
        """Return the tally as sentences. `activations` says whether the checkpoint's config asks for quantised
        activations.
        """
        lines = []
        if self.packed:
            lines.append(f"{self.packed.total()} quantised weights stay packed: {_format_counts(self.packed)}")
        if self.dequantised:
            lines.append(
                f"{self.dequantised.total()} quantised weights were dequantised on load: "
                f"{_format_counts(self.dequantised)}"
            )
        if lines and activations:
            lines.append("activations are not quantised, as its config would have it: products are at least as exact")
        return lines


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
