"""The shapes of draft trees that the settings define: depth, width, number of nodes."""

from pydantic import BaseModel, ConfigDict

from cluster.config import ConfigError, EngineConfig


class TreeShape(BaseModel):
    """S, K and N of one step: depth, children per node, nodes (root included). With N = 1 there is no speculation.

    The last `forced` nodes and levels are not drafted: they are reserved for tokens that a grammar forces. `room` is
    the number of forced nodes that `forcing` adds for a step with a grammar.
    """

    model_config = ConfigDict(frozen=True)

    num_steps: int
    topk: int
    num_draft_tokens: int
    forced: int = 0
    room: int = 0

    @property
    def drafted(self) -> "TreeShape":
        """The part of the tree that is drafted: the shape without the forced nodes and levels."""
        return self._longer(-self.forced)

    def forcing(self, most: int | None = None) -> "TreeShape":
        """The shape with up to `most` forced nodes for grammars. Plain and forced shapes are returned unchanged."""
        room = self.room if most is None else min(self.room, most)
        return self._longer(room) if self.num_steps and not self.forced else self

    def _longer(self, more: int) -> "TreeShape":
        if not more:
            return self
        steps, nodes = self.num_steps + more, self.num_draft_tokens + more
        sizes = {"num_steps": steps, "num_draft_tokens": nodes, "forced": self.forced + more}
        return self.model_copy(update=sizes)

    @property
    def window(self) -> int:
        """W, the number of KV slots beyond the committed tokens that a step may write for a request. Verify needs N
        slots, draft levels K (S - 1) with the drafted S, and extend S + 1. The phases follow each other, so they share
        the slots.
        """
        return max(self.num_draft_tokens, self.topk * (self.drafted.num_steps - 1), self.num_steps + 1)


def tiers(shape: TreeShape) -> tuple[TreeShape, ...]:
    """The tree shapes that a step may use, by depth: plain decoding first, `shape` last; all with the same K."""
    shallower = []
    for steps in range(shape.num_steps):
        nodes = min(shape.num_draft_tokens, _most_nodes(steps, shape.topk))
        shallower.append(shape.model_copy(update={"num_steps": steps, "num_draft_tokens": nodes}))
    return (*shallower, shape)


def _most_nodes(steps: int, topk: int) -> int:
    """The most nodes that `steps` levels can propose: the root, K in the first level, K * K in each later one."""
    return 1 if steps == 0 else topk + (steps - 1) * topk * topk + 1


PLAIN = TreeShape(num_steps=0, topk=1, num_draft_tokens=1)
DEFAULT_NUM_STEPS = 3
DEFAULT_TOPK = 1


def tree_shape(config: EngineConfig) -> TreeShape:
    """Return the tree shape of a config, with defaults filled in and limits checked.

    Raises:
        ConfigError: more nodes than the levels can propose, or a chain whose size is not depth + 1.
    """
    if config.speculative_draft_model_path is None:
        return PLAIN
    steps = config.speculative_num_steps or DEFAULT_NUM_STEPS
    topk = config.speculative_eagle_topk or DEFAULT_TOPK
    most = _most_nodes(steps, topk)
    nodes = config.speculative_num_draft_tokens
    if topk == 1:
        if nodes is not None and nodes != steps + 1:
            raise ConfigError(
                f"speculative_num_draft_tokens must be speculative_num_steps + 1 = {steps + 1} when "
                f"speculative_eagle_topk is 1, got {nodes}; leave it out or raise speculative_eagle_topk"
            )
        nodes = steps + 1
    nodes = nodes or min(most, 4 * steps)
    if nodes > most:
        raise ConfigError(
            f"speculative_num_draft_tokens {nodes} is more than the {most} nodes that speculative_num_steps {steps} "
            f"and speculative_eagle_topk {topk} can propose; lower it"
        )
    return TreeShape(num_steps=steps, topk=topk, num_draft_tokens=nodes, room=config.speculative_forced_tokens)
