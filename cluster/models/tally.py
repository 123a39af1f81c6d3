"""A tally of a checkpoint's quantised weights: how many stay packed, how many were dequantised on load."""

from collections import Counter
from dataclasses import dataclass, field

from cluster.kernels.interface import Stack, Weight
from cluster.kernels.quantised import Quantised


@dataclass(slots=True)
class QuantisationTally:
    """Counts of packed and of dequantised weights, by kind. Packed weights have `numbers` values in `nbytes` bytes."""

    packed: Counter[str] = field(default_factory=Counter)
    dequantised: Counter[str] = field(default_factory=Counter)
    numbers: int = 0
    nbytes: int = 0

    def keep(self, matrix: Quantised, made: Weight | Stack, count: int = 1) -> None:
        """Count `count` matrices like `matrix` that stay packed, as `made`."""
        self.packed[matrix.about] += count
        outputs, inputs = matrix.shape
        self.numbers += count * outputs * inputs
        self.nbytes += made.nbytes

    def lines(self, activations: bool) -> list[str]:
        """Return the tally in words. `activations` says whether the checkpoint's config wants quantised activations."""
        said = []
        if self.packed:
            said.append(f"{self.packed.total()} quantised weights stay packed: {_shown(self.packed)}")
        if self.dequantised:
            said.append(
                f"{self.dequantised.total()} quantised weights were dequantised on load: {_shown(self.dequantised)}"
            )
        if said and activations:
            said.append("activations are not quantised, as its config would have it: products are at least as exact")
        return said


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {about}" for about, count in sorted(counts.items()))
