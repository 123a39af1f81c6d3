"""How many prompt rows may ride in a step without holding up those who decode: a cost in rows, known before the step.

A step costs `base` rows whatever is in it, one per tree row of a decoding request, and one per prompt row, plus what
the prompt row's attention costs: as much again for every `reach` tokens before it. No clock: the same requests give
the same chunks on every run.
"""

from dataclasses import dataclass

from cluster.arch import LayerGeometry

STRETCH = 1.3  # how much longer than the busiest rank's decoding alone a step with prompt rows may take
# Rows that cost as much as a step without any: launching it, reading the weights. On a GPU what a step reads, not what
# it computes, sets the pace until there are a few hundred rows.
BASE_ROWS = {"cpu": 32.0, "cuda": 256.0}


@dataclass(frozen=True, slots=True)
class Pace:
    """The costs of one rank's rows. `tree` is N, the rows of a decoding request."""

    base: float
    reach: float
    tree: int

    def allowance(self, decodes: int, busiest: int) -> float:
        """What prompt rows may cost beside `decodes` requests of this rank and `busiest` of the busiest one."""
        busiest = max(decodes, busiest)
        return STRETCH * (self.base + busiest * self.tree) - self.base - decodes * self.tree

    def cost(self, start: int, stop: int) -> float:
        """What prompt rows `start` to `stop - 1` cost."""
        return (stop - start) * (1.0 + (start + stop) / (2.0 * self.reach))

    def rows(self, start: int, allowance: float) -> int:
        """The most rows from `start` on that cost no more than `allowance`, at least one, so that prompts go on."""
        before = self.reach + start
        return max(1, int((before * before + 2.0 * self.reach * allowance) ** 0.5 - before))


def pace_of(layer: LayerGeometry, tree: int, device: str, attn_dp: int = 1) -> Pace:
    """The pace of a target with such layers: multiplications of a row's matrices over those of its attention.

    A rank's rows keep it alone busy with their attention, and the ranks of all `attn_dp` groups with their MLPs.
    """
    heads = layer.heads * layer.head_dim
    matrices = layer.hidden * (layer.qkv_rows + heads + 3 * layer.token_columns / attn_dp)
    return Pace(BASE_ROWS[device], matrices / (2.0 * heads), tree)
