"""The attention primitive with FlashInfer: its kernels attend committed tokens and prompts; Triton attends the window.

FlashInfer's kernels with a mask are slower, and those for latents take no mask. So FlashInfer attends a tree's
committed tokens without a mask and returns log-sum-exps. The Triton kernel attends the rest by the ancestor bits and
merges both. Results equal those of `TorchAttention` up to rounding.
"""

from collections.abc import Sequence

from torch import Tensor

from cluster.attention.flashinfer.plans import RunnerPlans, WrapperPlan
from cluster.attention.flashinfer.readers import CellReader, LatentReader, PagedReader
from cluster.attention.shape import AttentionShape
from cluster.attention.triton_backend import Before, LayerCall, TritonAttention
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
        shape: AttentionShape,
        flashinfer: FlashInfer,
        shares: Sequence[Share],
    ) -> None:
        """Bind to a pool. `shares` says for each layer what FlashInfer computes; the rest is as in `TorchAttention`."""
        assert pool.coded is None, "its FP8 caches have other scales than ours"
        super().__init__(pool, table, shape)
        given = flashinfer, pool.kv, table.page_size, self._heads, self._scale
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

    def _attend_tree(self, call: LayerCall, tree: TreeRows, before: Before | None = None) -> None:
        if self._tree is not None and call.window in self._of_trees:
            before = self._read(self._tree, call, self._tree.until)
        super()._attend_tree(call, tree, before)

    def _attend_text(self, call: LayerCall, text: PromptRows, first_row: int) -> None:
        plan = self._texts.get(call.window)
        if plan is None:
            super()._attend_text(call, text, first_row)
            return
        rows = slice(first_row, first_row + plan.rows)
        own = call._replace(q=call.q[rows], bad=call.bad[rows], out=call.out[rows])
        self._join(own, self._read(plan, own))

    def _read(self, plan: WrapperPlan, call: LayerCall, until: Tensor | None = None) -> Before:
        """Run FlashInfer's attention of the plan's rows, which are the first of `call`. Its values go to `call.out`;
        later `_join` replaces them by the merged values.
        """
        values = call.out[: plan.rows].view(plan.rows, self._heads, self._value_dim)
        return Before(values, self._plans.reader.run(plan.wrapper, call.memory, call.q[: plan.rows], values), until)
