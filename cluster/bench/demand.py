"""The least work of a step: the bytes that each of its forwards must read, and its floating-point operations.

Counted from the resolved models: weights once per forward, the visible KV once per request and layer, logits once.
Savings by a cache and a kernel's other reads and writes are not counted. Weights and KV are counted in the dtype that
the models compute in; quantised weights and KV take less.

Legend: R requests, T rows, K topk, S depth, N nodes, V columns of a head.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from cluster.arch import DraftSpec, LayerGeometry
from cluster.arch.resolve import ResolvedConfig
from cluster.arch.safetensors.tensors import layer_tensors
from cluster.bench.ceilings import Ceilings

READ_ROWS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
"""The attention projections that read a layer's input. If that input is [embedding, hidden], they are twice as wide."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`read` bytes and `computed` floating-point operations; a multiply-add counts as two."""

    read: float = 0.0
    computed: float = 0.0

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.read + other.read, self.computed + other.computed)


def least_seconds(forwards: Iterable[Demand], best: Ceilings) -> float:
    """Return the least time of these forwards, run one after the other, on a machine with these ceilings."""
    return sum(best.least_seconds(each.read, each.computed) for each in forwards)


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of a forward: `each` rows for each of R `requests`. A request has `context` committed tokens, on
    average.
    """

    requests: int
    each: int
    context: float

    @property
    def count(self) -> int:
        """T, the number of rows."""
        return self.requests * self.each


@dataclass(frozen=True, slots=True)
class MatrixNumbers:
    """How many numbers one layer's matrices have. `common` counts the matrices that every row uses; `each` counts those
    of one expert. A row uses `active` of the `experts` experts.
    """

    common: int
    each: int = 0
    experts: int = 0
    active: int = 0

    def touched(self, rows: int) -> float:
        """Return how many different experts `rows` rows use on average, if all experts are equally likely."""
        # An expert is unused only if every row leaves it out: probability (1 - active / experts) ** rows.
        return self.experts * (1 - (1 - self.active / self.experts) ** rows) if self.experts else 0.0


def numbers_of(g: LayerGeometry, pair: bool = False) -> MatrixNumbers:
    """Count the numbers of a layer's matrices. If `pair`, the layer's attention reads [embedding, hidden]."""
    common = routed = 0
    for name, shape in layer_tensors("", g):
        if len(shape) < 2:
            continue
        if ".experts." in name:
            routed += prod(shape)
            continue
        common += prod(shape)
        if pair and name.split(".")[-2] in READ_ROWS and shape[1] == g.hidden:
            common += prod(shape)
    if g.gated:
        common += g.heads * g.head_dim * g.hidden * (2 if pair else 1)
    if g.moe is None:
        return MatrixNumbers(common)
    return MatrixNumbers(common, routed // g.moe.experts, g.moe.experts, g.moe.active)


def layer_demand(g: LayerGeometry, rows: ForwardRows, itemsize: int, pair: bool = False) -> Demand:
    """Return the demand of one layer: its weights, the KV cells of the prefix and of the rows, and the attention of
    each row over the prefix and itself.
    """
    weights, count = numbers_of(g, pair), rows.count
    prefix = rows.context if g.sliding_window is None else min(rows.context, g.sliding_window)
    read = weights.common + weights.touched(count) * weights.each
    read += rows.requests * (prefix + rows.each) * prod(g.cell)
    computed = 2.0 * count * (weights.common + weights.active * weights.each)
    computed += 2.0 * count * (prefix + 1) * g.heads * (g.head_dim + g.value_dim)
    return Demand(read * itemsize, computed)


def matrix_demand(inputs: int, outputs: int, rows: int, itemsize: int, kept: bool = False) -> Demand:
    """Return the demand of multiplying rows by one weight. If `kept`, the result is read once more, as logits are."""
    read = inputs * outputs + (rows * outputs if kept else 0)
    return Demand(float(read * itemsize), 2.0 * rows * inputs * outputs)


def target_demand(models: ResolvedConfig, rows: ForwardRows, itemsize: int) -> Demand:
    """Return the demand of one forward of the target, head included."""
    arch, whole = models.target, Demand(float(rows.count * models.target.hidden * itemsize))
    for layer in arch.layers:
        whole += layer_demand(layer, rows, itemsize)
    return whole + matrix_demand(arch.hidden, arch.vocab_size, rows.count, itemsize, kept=True)


def draft_demand(spec: DraftSpec, rows: ForwardRows, chosen: int, itemsize: int, fused: bool = False) -> Demand:
    """Return the demand of one forward of a draft's runner. The head runs on `chosen` rows; `fc` of an EAGLE-3 draft
    runs only if `fused`.
    """
    whole = Demand(float(rows.count * spec.hidden * itemsize))
    for layer in spec.layers:
        whole += layer_demand(layer.geometry, rows, itemsize, layer.pair)
    if spec.kind != "eagle3":
        whole += matrix_demand(2 * spec.hidden, spec.hidden, rows.count, itemsize)
    elif fused and spec.fc:
        whole += matrix_demand(spec.fc_in, spec.hidden, rows.count, itemsize)
    if chosen:
        whole += matrix_demand(spec.hidden, spec.draft_vocab_size, chosen, itemsize, kept=True)
    return whole


def step_demand(models: ResolvedConfig, requests: int, context: float, itemsize: int) -> dict[str, list[Demand]]:
    """Return the forwards of each phase of a step in which R requests decode, with trees of the models' shape."""
    shape, spec = models.shape, models.draft
    target = target_demand(models, ForwardRows(requests, shape.num_draft_tokens, context), itemsize)
    found: dict[str, list[Demand]] = {"draft": [], "target": [target], "extend": []}
    if spec is None:
        return found
    for level in range(1, shape.num_steps):
        each = shape.topk * (level if models.runners > 1 else 1)  # with several runners, runner l runs levels 1 to l
        found["draft"].append(draft_demand(spec, ForwardRows(requests, each, context), requests * shape.topk, itemsize))
    rows = ForwardRows(requests, shape.num_steps + 1, context)
    for runner in range(max(1, models.runners)):
        found["extend"].append(draft_demand(spec, rows, 0 if runner else requests, itemsize, fused=not runner))
    return found
