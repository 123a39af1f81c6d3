"""Calls FlashInfer's wrappers, for caches of keys and values and for caches of latents, but knows nothing of steps."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cluster.kernels.flashinfer.launch import latent_launch, paged_launch
from cluster.kernels.flashinfer.library import MAX_LATENT_LINES, MAX_LINES, FlashInfer

WORKSPACE = 384 << 20
"""Bytes for partial results over many positions, shared by all wrappers. FlashInfer advises 128 MB for small models."""


class AttentionWork(NamedTuple):
    """Attention of n requests. Request i has rows `rows[i]` to `rows[i + 1] - 1`, and `pages[i + 1] - pages[i]` pages,
    whose numbers are in `page_list` (int32, on the device) from `pages[i]` on. It has `lens[i]` >= 1 tokens. If
    `causal` is False, each row of a request sees all of its tokens. If `causal` is True, the rows of a request are its
    last tokens, and each row sees itself and at most `window` tokens before it (-1: all). `graph_shape` is set for
    captured programs only: the number of rows of every request, and the most tokens of a request.
    """

    rows: Sequence[int]
    pages: Sequence[int]
    lens: Sequence[int]
    page_list: Tensor
    causal: bool
    window: int = -1
    graph_shape: tuple[int, int] | None = None


class GraphBuffers(NamedTuple):
    """Fixed int32 device buffers of a CUDA-graph wrapper, for n requests: row offsets `rows` `[n + 1]`, page offsets
    `starts` `[n + 1]`, page numbers `page_list` (as many as n requests can have), and `lens` `[n]`. For keys and
    values, `lens` are the numbers of tokens in the last pages of the requests; for latents, those of all their tokens.
    """

    rows: Tensor
    starts: Tensor
    page_list: Tensor
    lens: Tensor

    @classmethod
    def of(cls, requests: int, longest: int, device: torch.device) -> "GraphBuffers":
        """Allocate buffers for `requests` requests of at most `longest` pages."""
        sizes = requests + 1, requests + 1, requests * longest, requests
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


class CellReader(Protocol):
    """Calls FlashInfer for one kind of cache: keys and values, or latents."""

    def wrapper(self, buffers: GraphBuffers | None = None) -> Any:
        """Return a FlashInfer wrapper with its own memory for one plan; with `buffers`, it is for CUDA graphs."""

    def plan(self, wrapper: Any, work: AttentionWork) -> None:
        """Plan `work` for the next runs of `wrapper`. The plan is copied to the device asynchronously, from host memory
        that the wrapper's next plan overwrites.
        """

    def run(self, wrapper: Any, memory: Tensor, q: Tensor, out: Tensor) -> Tensor:
        """Attend q `[T, nh, d]` over one layer's `memory` `[slots, ..]` into `out` `[T, nh, dv]`; return the
        log-sum-exps to base 2, `[T, nh]`.
        """

    def launch_arguments(self, wrapper: Any) -> dict[str, Any]:
        """Return the launch arguments of `run` under the current plan. Two plans with equal launch arguments differ
        only in the contents of memory, so one CUDA graph serves both.
        """

    def fits(self, rows: int) -> bool:
        """Return whether one plan can have `rows` rows."""


class PagedReader:
    """Calls FlashInfer for caches of keys and values, with cells `[2, nkv, d]`."""

    def __init__(self, flashinfer: FlashInfer, pool: Tensor, page_size: int, heads: int, scale: float) -> None:
        """`pool` is `[layers, slots, 2, nkv, d]`."""
        *_, self._kv_heads, self._head_dim = pool.shape
        self._flashinfer, self._page_size, self._heads, self._scale = flashinfer, page_size, heads, scale
        self._dtype, self._device = pool.dtype, pool.device

    def wrapper(self, buffers: GraphBuffers | None = None) -> Any:
        """See `CellReader`."""
        graph_arguments: dict[str, Any] = {}
        if buffers is not None:
            graph_arguments = {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffers.rows,
                "paged_kv_indptr_buf": buffers.starts,
                "paged_kv_indices_buf": buffers.page_list,
                "paged_kv_last_page_len_buf": buffers.lens,
            }
        arguments = {"kv_layout": "NHD", "backend": self._flashinfer.variant}
        return self._flashinfer.paged(workspace(self._device), **arguments, **graph_arguments)

    def plan(self, wrapper: Any, work: AttentionWork) -> None:
        """See `CellReader`."""
        rows_per_request, max_tokens = work.graph_shape or (None, None)
        wrapper.plan(
            qo_indptr=_int32_tensor(work.rows),
            paged_kv_indptr=_int32_tensor(work.pages),
            paged_kv_indices=work.page_list,
            paged_kv_last_page_len=_int32_tensor([(count - 1) % self._page_size + 1 for count in work.lens]),
            num_qo_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim_qk=self._head_dim,
            page_size=self._page_size,
            causal=work.causal,
            sm_scale=self._scale,
            window_left=work.window,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            max_token_per_sequence=rows_per_request,
            max_sequence_kv=max_tokens,
            uniform_q_len=rows_per_request,
        )

    def run(self, wrapper: Any, memory: Tensor, q: Tensor, out: Tensor) -> Tensor:
        """See `CellReader`."""
        lse: Tensor
        _, lse = wrapper.run(q, paged_view(memory, self._page_size), out=out, return_lse=True)
        return lse

    def launch_arguments(self, wrapper: Any) -> dict[str, Any]:
        """See `CellReader`."""
        return paged_launch(wrapper)

    def fits(self, rows: int) -> bool:
        """See `CellReader`."""
        return rows * self._heads <= MAX_LINES


class LatentReader:
    """Calls FlashInfer for caches of latents (MLA), with cells `[1, 1, d]`. The first `value_dim` numbers of a cell are
    the value of all heads.
    """

    def __init__(
        self, flashinfer: FlashInfer, pool: Tensor, page_size: int, heads: int, scale: float, value_dim: int
    ) -> None:
        """`pool` is `[layers, slots, 1, 1, d]`."""
        self._flashinfer, self._page_size, self._heads, self._scale = flashinfer, page_size, heads, scale
        self._value_dim, self._rest_dim = value_dim, pool.shape[-1] - value_dim
        self._dtype, self._device = pool.dtype, pool.device

    def wrapper(self, buffers: GraphBuffers | None = None) -> Any:
        """See `CellReader`."""
        graph_arguments: dict[str, Any] = {}
        if buffers is not None:
            graph_arguments = {
                "use_cuda_graph": True,
                "qo_indptr": buffers.rows,
                "kv_indptr": buffers.starts,
                "kv_indices": buffers.page_list,
                "kv_len_arr": buffers.lens,
            }
        return self._flashinfer.latent(workspace(self._device), backend=self._flashinfer.variant, **graph_arguments)

    def plan(self, wrapper: Any, work: AttentionWork) -> None:
        """See `CellReader`."""
        assert work.window < 0, "latents have no sliding windows"
        metadata = self._flashinfer.make_metadata(
            qo_indptr=_int32_tensor(work.rows),
            kv_indptr=_int32_tensor(work.pages),
            kv_indices=work.page_list,
            kv_len_arr=_int32_tensor(work.lens),
        )
        wrapper.plan(
            metadata=metadata,
            num_heads=self._heads,
            head_dim_ckv=self._value_dim,
            head_dim_kpe=self._rest_dim,
            page_size=self._page_size,
            causal=work.causal,
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            lse_mode="base2",
        )

    def run(self, wrapper: Any, memory: Tensor, q: Tensor, out: Tensor) -> Tensor:
        """See `CellReader`."""
        lse: Tensor
        cells = memory.view(-1, self._page_size, self._value_dim + self._rest_dim)
        _, lse = wrapper.run(query=q, kv_cache=cells, out=out, return_lse=True)
        return lse

    def launch_arguments(self, wrapper: Any) -> dict[str, Any]:
        """See `CellReader`."""
        return latent_launch(wrapper)

    def fits(self, rows: int) -> bool:
        """See `CellReader`."""
        return rows * self._heads <= MAX_LATENT_LINES


def paged_view(memory: Tensor, page_size: int) -> Tensor:
    """Return a view of one layer `[slots, 2, nkv, d]` in FlashInfer's shape `[pages, 2, page_size, nkv, d]`."""
    return memory.view(-1, page_size, *memory.shape[1:]).transpose(1, 2)


def _int32_tensor(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@cache
def workspace(device: torch.device) -> Tensor:
    """Return the workspace of a device. All wrappers share it, as their kernels run one after the other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
