"""How FlashInfer is told of pages and asked for attention: of keys and values, and of latents. Knows no steps."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cluster.kernels.flashinfer.launch import latent_launch, paged_launch
from cluster.kernels.flashinfer.library import LATENT_LINES, LINES, FlashInfer

WORKSPACE = 384 << 20
"""Bytes for parts of long prefixes, which wrappers take turns in; FlashInfer recommends 128 MB for small models."""


class AttentionWork(NamedTuple):
    """n requests, the first `pages[i + 1] - pages[i]` pages of request i being `listed`, int32 on the device, from
    `pages[i]` on: rows `rows[i]` to `rows[i + 1] - 1` see its first `lens[i]` >= 1 tokens, all of them, or if `causal`
    as the last rows of a text, back to `window` tokens before themselves (-1: all). `uniform` is said of work that is
    repeated: how many rows each request always has, and the most tokens that one can have.
    """

    rows: Sequence[int]
    pages: Sequence[int]
    lens: Sequence[int]
    listed: Tensor
    causal: bool
    window: int = -1
    uniform: tuple[int, int] | None = None


class GraphBuffers(NamedTuple):
    """Memory on the device, int32, in which a wrapper for graphs keeps what its kernels read: of n requests the ends of
    their `rows` `[n + 1]`, where their pages start `[n + 1]`, the pages `listed`, as many as they can have, and what it
    tells lengths by, `lens` `[n]`.
    """

    rows: Tensor
    starts: Tensor
    listed: Tensor
    lens: Tensor

    @classmethod
    def of(cls, requests: int, longest: int, device: torch.device) -> "GraphBuffers":
        """Those of so many requests of at most `longest` pages."""
        sizes = requests + 1, requests + 1, requests * longest, requests
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


class CellReader(Protocol):
    """One kind of cell."""

    def wrapper(self, buffers: GraphBuffers | None = None) -> Any:
        """A wrapper of FlashInfer's, with memory of its own for one plan; with `buffers`, one for graphs."""
        ...

    def plan(self, wrapper: Any, work: AttentionWork) -> None:
        """Have `wrapper` do this work from now on. It copies its plan to the device without waiting, out of memory that
        its next plan is written to.
        """
        ...

    def run(self, wrapper: Any, memory: Tensor, q: Tensor, out: Tensor) -> Tensor:
        """Attend, rows q `[T, nh, d]` over one layer's `memory` `[slots, ..]` -> `out` `[T, nh, dv]`; returns the
        logarithms to base 2 of the sums, `[T, nh]`.
        """
        ...

    def launched(self, wrapper: Any) -> dict[str, Any]:
        """All that `run` launches with, as `wrapper` is planned: two plans of which it is the same differ in nothing
        but what lies in memory.
        """
        ...

    def fits(self, rows: int) -> bool:
        """Whether one plan can have so many rows."""
        ...


class PagedReader:
    """Cells of k and v `[2, nkv, d]`."""

    def __init__(self, flashinfer: FlashInfer, pool: Tensor, page_size: int, heads: int, scale: float) -> None:
        """`pool` is `[layers, slots, 2, nkv, d]`."""
        *_, self._kv_heads, self._size = pool.shape
        self._flashinfer, self._page_size, self._heads, self._scale = flashinfer, page_size, heads, scale
        self._dtype, self._device = pool.dtype, pool.device

    def wrapper(self, buffers: GraphBuffers | None = None) -> Any:
        """See `CellReader`."""
        kept: dict[str, Any] = {}
        if buffers is not None:
            kept = {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffers.rows,
                "paged_kv_indptr_buf": buffers.starts,
                "paged_kv_indices_buf": buffers.listed,
                "paged_kv_last_page_len_buf": buffers.lens,
            }
        given = {"kv_layout": "NHD", "backend": self._flashinfer.variant}
        return self._flashinfer.paged(workspace(self._device), **given, **kept)

    def plan(self, wrapper: Any, work: AttentionWork) -> None:
        """See `CellReader`."""
        each, longest = work.uniform or (None, None)
        wrapper.plan(
            qo_indptr=_numbers(work.rows),
            paged_kv_indptr=_numbers(work.pages),
            paged_kv_indices=work.listed,
            paged_kv_last_page_len=_numbers([(count - 1) % self._page_size + 1 for count in work.lens]),
            num_qo_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim_qk=self._size,
            page_size=self._page_size,
            causal=work.causal,
            sm_scale=self._scale,
            window_left=work.window,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            max_token_per_sequence=each,
            max_sequence_kv=longest,
            uniform_q_len=each,
        )

    def run(self, wrapper: Any, memory: Tensor, q: Tensor, out: Tensor) -> Tensor:
        """See `CellReader`."""
        lse: Tensor
        _, lse = wrapper.run(q, paged_view(memory, self._page_size), out=out, return_lse=True)
        return lse

    def launched(self, wrapper: Any) -> dict[str, Any]:
        """See `CellReader`."""
        return paged_launch(wrapper)

    def fits(self, rows: int) -> bool:
        """See `CellReader`."""
        return rows * self._heads <= LINES


class LatentReader:
    """Cells of one latent `[1, 1, d]`, the first `value` numbers of which are the values of all heads."""

    def __init__(
        self, flashinfer: FlashInfer, pool: Tensor, page_size: int, heads: int, scale: float, value: int
    ) -> None:
        """`pool` is `[layers, slots, 1, 1, d]`."""
        self._flashinfer, self._page_size, self._heads, self._scale = flashinfer, page_size, heads, scale
        self._value, self._behind = value, pool.shape[-1] - value
        self._dtype, self._device = pool.dtype, pool.device

    def wrapper(self, buffers: GraphBuffers | None = None) -> Any:
        """See `CellReader`."""
        kept: dict[str, Any] = {}
        if buffers is not None:
            kept = {
                "use_cuda_graph": True,
                "qo_indptr": buffers.rows,
                "kv_indptr": buffers.starts,
                "kv_indices": buffers.listed,
                "kv_len_arr": buffers.lens,
            }
        return self._flashinfer.latent(workspace(self._device), backend=self._flashinfer.variant, **kept)

    def plan(self, wrapper: Any, work: AttentionWork) -> None:
        """See `CellReader`."""
        assert work.window < 0, "latents have no sliding windows"
        metadata = self._flashinfer.csr(
            qo_indptr=_numbers(work.rows),
            kv_indptr=_numbers(work.pages),
            kv_indices=work.listed,
            kv_len_arr=_numbers(work.lens),
        )
        wrapper.plan(
            metadata=metadata,
            num_heads=self._heads,
            head_dim_ckv=self._value,
            head_dim_kpe=self._behind,
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
        cells = memory.view(-1, self._page_size, self._value + self._behind)
        _, lse = wrapper.run(query=q, kv_cache=cells, out=out, return_lse=True)
        return lse

    def launched(self, wrapper: Any) -> dict[str, Any]:
        """See `CellReader`."""
        return latent_launch(wrapper)

    def fits(self, rows: int) -> bool:
        """See `CellReader`."""
        return rows * self._heads <= LATENT_LINES


def paged_view(memory: Tensor, page_size: int) -> Tensor:
    """One layer `[slots, 2, nkv, d]` as FlashInfer has it, `[pages, 2, page_size, nkv, d]`: the same memory."""
    return memory.view(-1, page_size, *memory.shape[1:]).transpose(1, 2)


def _numbers(given: Sequence[int]) -> Tensor:
    return torch.tensor(given, dtype=torch.int32)


@cache
def workspace(device: torch.device) -> Tensor:
    """The memory that all wrappers on a device work in, one after the other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
