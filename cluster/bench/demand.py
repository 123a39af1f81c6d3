"""The least work of a step: the bytes that each of its forwards must read, and its floating-point operations.

The bytes follow from the sizes of the models. A forward reads its weights once, the visible KV once per request and
layer, and its logits once. Reads that a hardware cache may save are not subtracted, and other reads and writes of
kernels are not added. Weights and KV are counted in the dtype that the models compute in, although quantised weights
and KV take fewer bytes.

Legend: R requests, T rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from cluster.arch import DraftSpec, LayerGeometry
from cluster.arch.resolve import ResolvedConfig
from cluster.arch.safetensors.tensors import layer_tensors
from cluster.bench.ceilings import Ceilings

INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
"""The attention projections that read a layer's input. If the input is [embedding, hidden], they are twice as wide."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`bytes_read` bytes and `operations` floating-point operations; a multiply-add counts as two."""

    bytes_read: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.bytes_read + other.bytes_read, self.operations + other.operations)


def least_seconds(forwards: Iterable[Demand], ceilings: Ceilings) -> float:
    """Return the least time of these forwards, run one after the other, on a machine with these ceilings."""
    return sum(ceilings.least_seconds(forward.bytes_read, forward.operations) for forward in forwards)


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of a forward: `rows_per_request` rows for each of R `requests`. On average, a request has `context`
    committed tokens.
    """

    requests: int
    rows_per_request: int
    context: float

    @property
    def total_rows(self) -> int:
        """T, the number of rows."""
        return self.requests * self.rows_per_request


@dataclass(frozen=True, slots=True)
class MatrixSizes:
    """How many numbers one layer's matrices have. `shared` counts the numbers of the matrices that every row uses;
    `per_expert` counts those of one expert. A row uses `active_experts` of the `experts` experts; both are 0 in a layer
    without experts.
    """

    shared: int
    per_expert: int = 0
    experts: int = 0
    active_experts: int = 0

    def expected_experts(self, rows: int) -> float:
        """Return how many different experts `rows` rows use on average, if all experts are equally likely."""
        # An expert is unused only if every row leaves it out: probability (1 - active / experts) ** rows.
        return self.experts * (1 - (1 - self.active_experts / self.experts) ** rows) if self.experts else 0.0


def matrix_sizes(g: LayerGeometry, concatenated_input: bool = False) -> MatrixSizes:
    """Return how many numbers a layer's matrices have. `concatenated_input` says that the attention reads [embedding,
    hidden].
    """
    shared = expert_numbers = 0
    for name, shape in layer_tensors("", g):
        if len(shape) < 2:
            continue
        if ".experts." in name:
            expert_numbers += prod(shape)
            continue
        shared += prod(shape)
        if concatenated_input and name.split(".")[-2] in INPUT_PROJECTIONS and shape[1] == g.hidden:
            shared += prod(shape)
    if g.gated:
        shared += g.heads * g.head_dim * g.hidden * (2 if concatenated_input else 1)
    if g.moe is None:
        return MatrixSizes(shared)
    return MatrixSizes(shared, expert_numbers // g.moe.experts, g.moe.experts, g.moe.active)


def layer_demand(g: LayerGeometry, rows: ForwardRows, itemsize: int, concatenated_input: bool = False) -> Demand:
    """Return the demand of one layer. It reads its weights, and the K and V of the prefix and of the rows; each row
    attends to the prefix and itself. The prefix is the context, or the sliding window if that is shorter. `itemsize` is
    the bytes of one number.
    """
    matrices, row_count = matrix_sizes(g, concatenated_input), rows.total_rows
    prefix = rows.context if g.sliding_window is None else min(rows.context, g.sliding_window)
    numbers_read = matrices.shared + matrices.expected_experts(row_count) * matrices.per_expert
    numbers_read += rows.requests * (prefix + rows.rows_per_request) * g.cell.numbers
    operations = 2.0 * row_count * (matrices.shared + matrices.active_experts * matrices.per_expert)
    operations += 2.0 * row_count * (prefix + 1) * g.heads * (g.head_dim + g.value_dim)
    return Demand(numbers_read * itemsize, operations)


def matrix_demand(inputs: int, outputs: int, rows: int, itemsize: int, reads_output: bool = False) -> Demand:
    """Return the demand of multiplying rows by one weight. If `reads_output`, the result is read too, as logits are."""
    numbers_read = inputs * outputs + (rows * outputs if reads_output else 0)
    return Demand(float(numbers_read * itemsize), 2.0 * rows * inputs * outputs)


def target_demand(models: ResolvedConfig, rows: ForwardRows, itemsize: int) -> Demand:
    """Return the demand of one forward of the target, LM head included."""
    arch, demand = models.target, Demand(float(rows.total_rows * models.target.hidden * itemsize))
    for layer in arch.layers:
        demand += layer_demand(layer, rows, itemsize)
    return demand + matrix_demand(arch.hidden, arch.vocab_size, rows.total_rows, itemsize, reads_output=True)


def draft_demand(spec: DraftSpec, rows: ForwardRows, head_rows: int, itemsize: int, with_fc: bool = False) -> Demand:
    """Return the demand of one forward of a draft's model. The LM head runs on `head_rows` rows. The projection `fc` of
    an EAGLE-3 draft runs only if `with_fc`.
    """
    demand = Demand(float(rows.total_rows * spec.hidden * itemsize))
    for layer in spec.layers:
        demand += layer_demand(layer.geometry, rows, itemsize, layer.pair)
    if spec.kind != "eagle3":
        demand += matrix_demand(2 * spec.hidden, spec.hidden, rows.total_rows, itemsize)
    elif with_fc and spec.fc:
        demand += matrix_demand(spec.fc_in, spec.hidden, rows.total_rows, itemsize)
    if head_rows:
        demand += matrix_demand(spec.hidden, spec.draft_vocab_size, head_rows, itemsize, reads_output=True)
    return demand


def step_demand(models: ResolvedConfig, requests: int, context: float, itemsize: int) -> dict[str, list[Demand]]:
    """Return, for each phase of a step (draft, target, extend), the demands of its forwards. Without a draft, only the
    target has a forward. R requests decode, each with `context` committed tokens on average, and trees have the shape
    `models.shape`.
    """
    shape, spec = models.shape, models.draft
    target = target_demand(models, ForwardRows(requests, shape.num_draft_tokens, context), itemsize)
    phases: dict[str, list[Demand]] = {"draft": [], "target": [target], "extend": []}
    if spec is None:
        return phases
    for level in range(1, shape.num_steps):
        # A multi-layer draft has a runner per level; runner l runs the rows of levels 1 to l.
        rows_per_request = shape.topk * (level if models.num_draft_runners > 1 else 1)
        phases["draft"].append(
            draft_demand(spec, ForwardRows(requests, rows_per_request, context), requests * shape.topk, itemsize)
        )
    rows = ForwardRows(requests, shape.num_steps + 1, context)
    for runner in range(max(1, models.num_draft_runners)):
        phases["extend"].append(draft_demand(spec, rows, 0 if runner else requests, itemsize, with_fc=not runner))
    return phases
