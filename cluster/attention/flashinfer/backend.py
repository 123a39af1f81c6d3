"""The attention primitive with FlashInfer. Its kernels attend committed tokens and prompts; Triton attends the nodes of
trees.

FlashInfer's kernels with a mask are slower, and its kernels for latents take no mask. So for tree rows, FlashInfer
attends committed tokens without a mask, and returns log-sum-exps. A Triton kernel attends the other tokens with the
ancestor bits as the mask, and another Triton kernel merges both results. Results equal those of `TorchAttention` up to
rounding.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from cluster.attention.flashinfer.plans import RunnerPlans, WrapperPlan
from cluster.attention.flashinfer.readers import CellReader, LatentReader, PagedReader
from cluster.attention.shape import AttentionShape
from cluster.attention.triton_backend import LayerCall, PrefixAttention, TritonAttention
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kernels.flashinfer.library import FlashInfer, Share
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool


class FlashInferAttention(TritonAttention):
    """Attention of the layers in one KV pool. Triton attends alone in three cases: in layers that `shares` exclude, in
    forwards with a limit `first` (those of the later models of a multi-layer draft), and where `RunnerPlans` has no
    plan.
    """

    def __init__(
        self,
        pool: KVPool,
        table: PageTable,
        shape: AttentionShape,
        flashinfer: FlashInfer,
        shares: Sequence[Share],
    ) -> None:
        """Bind to a pool and to the page table of the rank. `shape` is the shape of the model's attention. `shares`
        says for each layer what FlashInfer computes.
        """
        assert not pool.fp8, "its FP8 caches have other scales than ours"
        super().__init__(pool, table, shape)
        reader_arguments = flashinfer, pool.kv, table.page_size, self._heads, self._scale
        latent_reader = partial(LatentReader, value_dim=self._value_dim)
        reader: CellReader = (latent_reader if pool.cell.is_latent else PagedReader)(*reader_arguments)
        self._plans = RunnerPlans(reader, table)
        shares_and_windows = list(zip(shares, self._windows, strict=True))
        self._tree_windows = {window for share, window in shares_and_windows if share.trees}
        self._prompt_windows = {window for share, window in shares_and_windows if share.texts}
        self._tree_plan: WrapperPlan | None = None
        self._prompt_plans: dict[int, WrapperPlan | None] = {}

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step: plan FlashInfer's wrappers on the host, outside of any captured program."""
        self._plans.begin(bounds)

    def bind(self, metadata: AttentionMetadata) -> None:
        """Use `metadata` for the attention calls of the next forward."""
        super().bind(metadata)
        self._tree_plan, self._prompt_plans = None, {}
        if metadata.first:
            return
        if metadata.tree is not None and self._tree_windows:
            self._tree_plan = self._plans.tree(metadata.tree)
        if metadata.text is not None:
            self._prompt_plans = {window: self._plans.text(metadata.text, window) for window in self._prompt_windows}

    def _attend_tree(self, call: LayerCall, tree: TreeRows, prefix: PrefixAttention | None = None) -> None:
        if self._tree_plan is not None and call.window in self._tree_windows:
            prefix = self._run_plan(self._tree_plan, call, self._tree_plan.prefix_lens)
        super()._attend_tree(call, tree, prefix)

    def _attend_text(self, call: LayerCall, text: PromptRows, first_row: int) -> None:
        plan = self._prompt_plans.get(call.window)
        if plan is None:
            super()._attend_text(call, text, first_row)
            return
        rows = slice(first_row, first_row + plan.rows)
        prompt_call = call._replace(q=call.q[rows], nonfinite_rows=call.nonfinite_rows[rows], out=call.out[rows])
        self._join(prompt_call, self._run_plan(plan, prompt_call))

    def _run_plan(self, plan: WrapperPlan, call: LayerCall, prefix_lens: Tensor | None = None) -> PrefixAttention:
        """Run FlashInfer on the rows of the plan, which are the first rows of `call`, and return the result. The values
        of the result are in `call.out`; `_join` later overwrites them with the merged values.
        """
        values = call.out[: plan.rows].view(plan.rows, self._heads, self._value_dim)
        return PrefixAttention(
            values, self._plans.reader.run(plan.wrapper, call.memory, call.q[: plan.rows], values), prefix_lens
        )
