"""The attention primitive with FlashInfer: its kernels attend committed tokens and prompts; Triton attends the window.

FlashInfer's kernels with a mask are slower, and those for latents take no mask. So FlashInfer attends a tree's
committed tokens without a mask and returns log-sum-exps. The Triton kernel attends the rest by the ancestor bits and
merges both. Results equal those of `TorchAttention` up to rounding.
"""

from collections.abc import Sequence

from torch import Tensor

from cluster.attention.flashinfer.plans import RunnerPlans, WrapperPlan
from cluster.attention.flashinfer.readers import CellReader, LatentReader, PagedReader
from cluster.attention.triton_backend import Before, TritonAttention
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kernels.flashinfer.library import FlashInfer, Share
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool


class FlashInferAttention(TritonAttention):
    """Attention over one runner's pool. Two things are left to Triton alone: layers that `shares` exclude, and forwards
    with a limit `first` (those of later draft runners).
    """

    def __init__(
        self,
        pool: KVPool,
        table: PageTable,
        heads: int,
        sliding_windows: Sequence[int | None],
        scale: float | None,
        value_dim: int | None,
        flashinfer: FlashInfer,
        shares: Sequence[Share],
    ) -> None:
        """Bind to a pool. `shares` says for each layer what FlashInfer computes; the rest is as in `TorchAttention`."""
        assert pool.coded is None, "its FP8 caches have other scales than ours"
        super().__init__(pool, table, heads, sliding_windows, scale, value_dim)
        given = flashinfer, pool.kv, table.page_size, heads, self._scale
        latent = pool.kv.shape[2] == 1
        reader: CellReader = LatentReader(*given, self._value_dim) if latent else PagedReader(*given)
        self._plans = RunnerPlans(reader, table)
        both = list(zip(shares, self._windows, strict=True))
        self._of_trees = {window for share, window in both if share.trees}
        self._of_texts = {window for share, window in both if share.texts}
        self._tree: WrapperPlan | None = None
        self._texts: dict[int, WrapperPlan | None] = {}

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step: plan FlashInfer's wrappers on the host, outside the captured program."""
        self._plans.begin(bounds)

    def bind(self, seen: AttentionMetadata) -> None:
        """Use `seen` for the calls of the next forward."""
        super().bind(seen)
        self._tree, self._texts = None, {}
        if seen.first:
            return
        if seen.tree is not None and self._of_trees:
            self._tree = self._plans.tree(seen.tree)
        if seen.text is not None:
            self._texts = {window: self._plans.text(seen.text, window) for window in self._of_texts}

    def _attend_tree(
        self, given: tuple[Tensor | None, ...], tree: TreeRows, first: int, window: int, before: Before | None = None
    ) -> None:
        q, memory, *_, out = given
        if self._tree is not None and window in self._of_trees:
            assert q is not None and memory is not None and out is not None
            before = self._read(self._tree, memory, q[: self._tree.rows], out, self._tree.until)
        super()._attend_tree(given, tree, first, window, before)

    def _attend_text(
        self, given: tuple[Tensor | None, ...], text: PromptRows, after: int, first: int, window: int
    ) -> None:
        plan = self._texts.get(window)
        if plan is None:
            super()._attend_text(given, text, after, first, window)
            return
        q, memory, _, bad, sinks, out = given
        assert q is not None and memory is not None and bad is not None and out is not None
        out = out[after : after + plan.rows]
        self._join(None, 0, bad[after:], sinks, self._read(plan, memory, q[after : after + plan.rows], out), out)

    def _read(self, plan: WrapperPlan, memory: Tensor, q: Tensor, out: Tensor, until: Tensor | None = None) -> Before:
        """Run FlashInfer's attention. Its values go to `out`; later `_join` replaces them by the merged values."""
        values = out[: plan.rows].view(plan.rows, self._heads, self._value_dim)
        return Before(values, self._plans.reader.run(plan.wrapper, memory, q, values), until)
