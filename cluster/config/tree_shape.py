"""The shapes of draft trees that the settings define: depth, width, number of nodes."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from cluster.config import ConfigError, EngineConfig
from cluster.config.speculation import NGRAM


class TreeShape(BaseModel):
    """The shape of the trees of one step: S = `num_steps` is the depth, K = `topk` the children per node, and
    N = `num_draft_tokens` the number of nodes, root included. With N = 1 there is no speculation.

    If `max_nodes` is above 0, the requests of a step share its rows (`spec/row_budget.py`): each request's tree has
    `max_nodes` nodes, of which N are verified *on average*. The largest N is `max_nodes`.

    The last `forced_nodes` nodes and levels are not drafted: they are reserved for tokens that a grammar forces.
    `max_forced_nodes` is the number of forced nodes that `with_forced_nodes` adds for a step with a grammar.

    If `lookup_tokens` is above 0, each tree also has a branch of as many nodes, which holds looked-up tokens (tokens
    that followed the same text earlier in the request, `spec/lookup.py`). The branch is S levels deep, and the draft
    only computes the first `lookup_drafted_steps` levels of the tree. No shape of a step has both looked-up and forced
    nodes; only the shape that gives the bounds of all shapes has both.
    """

    model_config = ConfigDict(frozen=True)

    num_steps: int
    topk: int
    num_draft_tokens: int
    forced_nodes: int = 0
    max_forced_nodes: int = 0
    max_nodes: int = 0
    lookup_tokens: int = 0
    lookup_drafted_steps: int = 0

    @property
    def selects_nodes(self) -> bool:
        """Whether a step verifies only some of the nodes of its trees."""
        return self.max_nodes > self.num_draft_tokens and not self.forced_nodes

    @property
    def drafted_nodes(self) -> int:
        """The number of nodes of each request's tree, verified or not, with forced and looked-up nodes."""
        return max(self.max_nodes, self.num_draft_tokens)

    @property
    def drafted_shape(self) -> "TreeShape":
        """The part of the tree that is drafted: the shape without forced and looked-up nodes and levels."""
        shape = self._extended(-self.forced_nodes)
        if not shape.lookup_tokens:
            return shape
        nodes = shape.drafted_nodes - shape.lookup_tokens
        sizes = {"num_steps": shape.lookup_drafted_steps, "num_draft_tokens": nodes}
        return shape.model_copy(update={**sizes, "max_nodes": shape.max_nodes and nodes, "lookup_tokens": 0})

    @property
    def label(self) -> tuple[int, int, int]:
        """What distinguishes this shape from other shapes that steps may use: the numbers of drafted levels, of
        verified nodes (on average, without forced nodes) and of looked-up tokens.
        """
        tier = self._extended(-self.forced_nodes)
        return tier.drafted_shape.num_steps, tier.num_draft_tokens, tier.lookup_tokens

    def with_forced_nodes(self, max_nodes: int | None = None) -> "TreeShape":
        """Return this shape with nodes for tokens that a grammar forces: `max_forced_nodes` of them, but at most
        `max_nodes` (None: no such limit). A shape without speculation, and a shape that already has such nodes, are
        returned unchanged.
        """
        extra_nodes = self.max_forced_nodes if max_nodes is None else min(self.max_forced_nodes, max_nodes)
        return self._extended(extra_nodes) if self.num_steps and not self.forced_nodes else self

    def _extended(self, extra_nodes: int) -> "TreeShape":
        if not extra_nodes:
            return self
        steps = self.num_steps + extra_nodes
        # A grammar's nodes may follow any drafted node, so all drafted nodes are verified.
        nodes = max(self.num_draft_tokens, self.max_nodes if extra_nodes > 0 else 0) + extra_nodes
        sizes = {"num_steps": steps, "num_draft_tokens": nodes, "forced_nodes": self.forced_nodes + extra_nodes}
        return self.model_copy(update=sizes)

    @property
    def window(self) -> int:
        """W, the number of KV slots beyond the committed tokens that a step may write for a request. Verifying needs a
        slot for each node of the request's tree. Drafting needs K (S - 1) slots, where S counts only the drafted
        levels. The extend phase needs S + 1 slots, where S counts all levels. The phases follow each other, so they
        share the slots.
        """
        return max(self.drafted_nodes, self.topk * (self.drafted_shape.num_steps - 1), self.num_steps + 1)


def tiers(shape: TreeShape, share_rows: bool = False) -> tuple[TreeShape, ...]:
    """Return the drafted tree shapes that a step may use, in order of depth: first plain decoding (depth 0), last the
    shape with all levels and nodes of `shape`. All have the same K.

    Each depth has one shape, with as many nodes as its levels can propose, up to N. If `share_rows`, the requests of a
    step share its rows (see `TreeShape`), and each depth also has smaller shapes, in order of their number of nodes.
    """
    shapes = list[TreeShape]()
    for steps in range(shape.num_steps + 1):
        most = min(shape.num_draft_tokens, _max_nodes(steps, shape.topk))
        counts = _node_counts(steps, most, shape.topk) if share_rows else [most]
        update = {"num_steps": steps, "max_nodes": most if share_rows and steps else 0}
        shapes += [shape.model_copy(update={**update, "num_draft_tokens": nodes}) for nodes in counts]
    return tuple(shapes)


def lookup_tiers(shape: TreeShape, lookup_tokens: int, share_rows: bool = False) -> tuple[TreeShape, ...]:
    """Return the tree shapes with looked-up tokens. Their looked-up branches are `lookup_tokens` deep, and at least as
    deep as `shape`. The draft computes only half of the levels of `shape`, rounded up: if the looked-up tokens are
    right, deeper levels of the draft bring little.

    If `share_rows`, there are up to three shapes. On average over the requests, the first has rows for the root, one
    path of the draft and one looked-up token, and the second for the root, one path and half of the looked-up tokens.
    The last verifies all nodes of every tree. If not `share_rows`, there is only the last one.
    """
    depth, levels = max(lookup_tokens, shape.num_steps), (shape.num_steps + 1) // 2
    most = min(shape.num_draft_tokens, _max_nodes(levels, shape.topk)) + depth
    counts = {levels + 2, levels + 1 + (depth + 1) // 2, most} if share_rows else {most}
    update = {"num_steps": depth, "lookup_tokens": depth, "lookup_drafted_steps": levels}
    update["max_nodes"] = most if share_rows else 0
    return tuple(shape.model_copy(update={**update, "num_draft_tokens": nodes}) for nodes in sorted(counts))


def largest(tiers: Sequence[TreeShape]) -> TreeShape:
    """Return a shape at least as large as each of `tiers`, which are shapes that the functions `tiers` and
    `lookup_tiers` have returned: the last drafted shape, with all looked-up tokens if there are any.
    """
    drafted, lookup_tokens = [shape for shape in tiers if not shape.lookup_tokens][-1], tiers[-1].lookup_tokens
    if not lookup_tokens:
        return drafted
    nodes = drafted.drafted_nodes + lookup_tokens
    update = {"num_steps": tiers[-1].num_steps, "num_draft_tokens": nodes, "max_nodes": tiers[-1].max_nodes and nodes}
    lookups = {"lookup_tokens": lookup_tokens, "lookup_drafted_steps": drafted.num_steps}
    return drafted.model_copy(update={**update, **lookups})


def _node_counts(num_steps: int, most: int, topk: int) -> list[int]:
    """Return the numbers of nodes of the shapes of one depth, in ascending order; the last number is `most`."""
    if topk == 1:
        return sorted({(most + 1) // 2, most}) if num_steps > 1 else [most]
    counts = [min(most, num_steps // 2 + 2)]
    while counts[-1] < most:  # each about 1.5 times the one before
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 2)))
    return counts


def _max_nodes(num_steps: int, topk: int) -> int:
    """Return how many nodes `num_steps` levels can propose: the root, K in the first level, K * K in each later one."""
    return 1 if num_steps == 0 else topk + (num_steps - 1) * topk * topk + 1


NO_SPECULATION = TreeShape(num_steps=0, topk=1, num_draft_tokens=1)
DEFAULT_NUM_STEPS, DEFAULT_NGRAM_STEPS = 3, 8
DEFAULT_TOPK = 1


def tree_shape(config: EngineConfig) -> TreeShape:
    """Return the tree shape of a config, with defaults filled in and limits checked.

    Raises:
        ConfigError: more nodes than the levels can propose, or a chain whose size is not depth + 1.
    """
    is_ngram = config.speculative_algorithm == NGRAM
    if config.speculative_draft_model_path is None and not is_ngram:
        return NO_SPECULATION
    steps = config.speculative_num_steps or (DEFAULT_NGRAM_STEPS if is_ngram else DEFAULT_NUM_STEPS)
    topk = config.speculative_eagle_topk or DEFAULT_TOPK
    max_nodes = _max_nodes(steps, topk)
    nodes = config.speculative_num_draft_tokens
    if topk == 1:
        if nodes is not None and nodes != steps + 1:
            raise ConfigError(
                f"speculative_num_draft_tokens must be speculative_num_steps + 1 = {steps + 1} when "
                f"speculative_eagle_topk is 1, got {nodes}; leave it out or raise speculative_eagle_topk"
            )
        nodes = steps + 1
    nodes = nodes or min(max_nodes, 4 * steps)
    if nodes > max_nodes:
        raise ConfigError(
            f"speculative_num_draft_tokens {nodes} is more than the {max_nodes} nodes that speculative_num_steps "
            f"{steps} and speculative_eagle_topk {topk} can propose; lower it"
        )
    return TreeShape(
        num_steps=steps, topk=topk, num_draft_tokens=nodes, max_forced_nodes=config.speculative_forced_tokens
    )
