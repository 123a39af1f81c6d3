"""The attention primitive in Triton. It reads the page table and the pages in place, without copies.

Its results equal those of `TorchAttention` up to rounding. No launch argument depends on a length, so a CUDA graph can
hold the launches. In this file a cell is the K and V of one token in one layer, a line is one query head of one row,
and a split is a part of the positions, computed by programs of its own.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.attention.kernel_layout import checked_cells, with_contiguous_rows
from cluster.attention.shape import AttentionShape
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kernels.attend import gpu as attend
from cluster.kernels.join import gpu as join
from cluster.kernels.launch import ACC_DTYPES, INTERPRETED, launch, next_power_of_2
from cluster.kernels.store import gpu as store
from cluster.kv.codes import max_magnitude
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool

LOG2E = attend.LOG2E.value
MAX_SPLITS = 64
MAX_SPLITS_AT_ONCE = 16  # splits whose values fit a program's registers together
INTERPRETED_PROCESSORS = 4  # more than one, so that tests in the interpreter also run with splits


class PrefixAttention(NamedTuple):
    """Attention computed by another library: values `out` `[T, nh, dv]`, and log-sum-exps to base 2, `lse` `[T, nh]`.

    For tree rows it covers the first `prefix_lens[i]` positions of request i (`prefix_lens` `[R]` int32). If
    `prefix_lens[i]` is 0, `out` and `lse` of the request are not valid. For prompt rows `prefix_lens` is None: the
    attention covers all positions, and all rows are valid.
    """

    out: Tensor
    lse: Tensor
    prefix_lens: Tensor | None = None


class LayerCall(NamedTuple):
    """One call of attention: q `[T, nh, d]` over a layer's cells in `memory` -> `out` `[T, nh * dv]`. `nonfinite_rows`
    `[T]` marks rows whose own new cells are not finite. `first` is as in `AttentionMetadata`; `window` is the sliding
    window as in `AttentionShape`, 0 for none.
    """

    q: Tensor
    memory: Tensor
    nonfinite_rows: Tensor
    sinks: Tensor | None
    out: Tensor
    first: int
    window: int


class TritonAttention:
    """Attention of the layers in one KV pool, by Triton kernels."""

    def __init__(self, pool: KVPool, table: PageTable, shape: AttentionShape) -> None:
        """Bind to a pool and to the page table of the rank. `shape` is the shape of the model's attention."""
        cell, key_dim = pool.cell, pool.cell.key_dim
        heads, windows, self._scale = shape.with_defaults(pool)
        self._pool, self._table, self._heads, self._kv_heads = pool, table, heads, cell.kv_heads
        self._value_dim = cell.value_dim
        self._window_map = pool.window_map
        self._windows = [window or 0 for window in windows]
        self._processors = processor_count(pool.kv.device)
        # Triton's blocks are powers of two, so a key of 576 numbers is read as FRONT = 512 and BACK = 64.
        key_front = 1 << (key_dim.bit_length() - 1)
        self._value_constants = {"VALUE_BLOCK": next_power_of_2(self._value_dim), "ACC_DTYPE": ACC_DTYPES[pool.dtype]}
        key_scales = len(cell.groups) if cell.is_latent else 1
        self._constants: dict[str, Any] = {
            "HEADS": heads,
            "KV_HEADS": cell.kv_heads,
            "HEAD_DIM": key_dim,
            "VALUE_DIM": self._value_dim,
            "CELL_SIZE": prod(pool.kv.shape[2:]),
            "VALUES_OFFSET": cell.values_offset,
            "SCALES_OFFSET": cell.numbers,
            "VALUE_SCALES_OFFSET": 0 if cell.is_latent else cell.kv_heads,
            "KEY_SCALES": key_scales if pool.fp8 else 0,
            "PAGE_SIZE": table.page_size,
            "SCALE": self._scale * LOG2E,
            "IS_WINDOW_POOL": pool.window_map is not None,
            "FRONT": max(16, key_front),
            "BACK": next_power_of_2(key_dim - key_front) if key_dim > key_front >= 16 else 0,
            "UPCAST": INTERPRETED and pool.dtype.itemsize == 2,
            **self._value_constants,
        }
        self._metadata: AttentionMetadata | None = None
        self._write_slots: Tensor | None = None

    def prepare(self, bounds: HostBounds) -> None:
        """Do nothing: the kernels read lengths on the device, so they need no bounds."""

    def bind(self, metadata: AttentionMetadata) -> None:
        """Use `metadata` for the attention calls of the next forward."""
        self._metadata = metadata
        # If trees have one node, the slots are a strided column of the windows. All layers use this contiguous copy.
        self._write_slots = self._pool.own_slots(metadata.write).contiguous()

    def __call__(self, layer: int, q: Tensor, kv: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Write kv `[T, *Cell.shape]` to the pool, unless it is None. Then compute the attention of the queries q
        `[T, nh, d]`, and return the result `[T, nh * dv]`.
        """
        metadata, write_slots, num_rows = self._metadata, self._write_slots, q.shape[0]
        assert metadata is not None and write_slots is not None, "bound before it is called"
        (q, kv), memory = checked_cells(q, kv, self._pool), self._pool.kv[layer]
        if kv is None:
            nonfinite_rows = torch.zeros(num_rows, dtype=torch.int32, device=q.device)
        else:
            nonfinite_rows = torch.empty(num_rows, dtype=torch.int32, device=q.device)
            self._store(kv, write_slots, memory, nonfinite_rows)
        tree_rows = 0 if metadata.tree is None else metadata.tree.rows.shape[0] * metadata.tree.bits.shape[1]
        # There may be more prompt rows than the chunks have together. No kernel writes the outputs of the surplus rows,
        # so outputs begin as 0.
        allocate = q.new_empty if tree_rows == num_rows else q.new_zeros
        out = allocate(num_rows, self._heads * self._value_dim)
        call = LayerCall(q, memory, nonfinite_rows, sinks, out, metadata.first, self._windows[layer])
        if metadata.tree is not None:
            self._attend_tree(call, metadata.tree)
        if metadata.text is not None:
            self._attend_text(call, metadata.text, tree_rows)
        return out

    def _store(self, kv: Tensor, write_slots: Tensor, memory: Tensor, nonfinite_rows: Tensor) -> None:
        """Write new cells to slots `write_slots`, and note in `nonfinite_rows` the rows whose cells are not finite."""
        cell, cell_size = self._pool.cell, self._pool.cell.numbers
        arguments = store.StoreArguments(kv, write_slots, memory, nonfinite_rows, kv.stride(0))
        if not self._pool.fp8:
            launch(store.store, (kv.shape[0],), arguments, CELL_SIZE=cell_size, BLOCK=next_power_of_2(cell_size))
            return
        (groups, group_size), *other_groups = cell.groups
        rest_groups, rest_size = other_groups[0] if other_groups else (0, 1)
        launch(
            store.store_coded,
            (kv.shape[0],),
            store.StoreCodedArguments(*arguments, max_abs=max_magnitude(self._pool.dtype)),
            CELL_SIZE=cell_size,
            GROUPS=groups,
            GROUP_SIZE=group_size,
            REST_GROUPS=rest_groups,
            REST_SIZE=rest_size,
            CELL_BYTES=cell.fp8_bytes,
            ACC_DTYPE=self._value_constants["ACC_DTYPE"],
            CELL_BLOCK=next_power_of_2(cell_size),
            BLOCK=next_power_of_2(max(group_size, rest_size)),
        )

    def _attend_tree(self, call: LayerCall, tree: TreeRows, prefix: PrefixAttention | None = None) -> None:
        """Attend the tree's rows. If `prefix` is given, attend only the positions from `prefix.prefix_lens` on, and
        merge the result with `prefix`.
        """
        bits, pages = with_contiguous_rows(tree.bits), self._table.device_pages
        requests, (_, rows_per_request, mask_words) = tree.rows.shape[0], bits.shape
        # After `prefix`, little more than the nodes of the tree is left to read. These are few, and their masks take
        # registers, so use fewer lines.
        blocks = self._blocks(rows_per_request, max_lines=128 if prefix is None else 32)
        # A request has ceil(rows_per_request * rep / lines) programs, where rep is the number of query heads of a KV
        # head.
        programs = requests * -(-rows_per_request * self._heads // self._kv_heads // blocks.lines)
        splits = 1 if prefix is not None else self._splits(programs * self._kv_heads)
        partials = None
        if splits > 1 or prefix is not None:
            partials_shape = requests * rows_per_request, self._heads, splits, self._constants["VALUE_BLOCK"] + 2
            partials = call.q.new_empty(partials_shape, dtype=torch.promote_types(call.q.dtype, torch.float32))
        arguments = attend.AttendArguments(
            q=call.q,
            memory=call.memory,
            pages=pages,
            window_pages=None if self._window_map is None else self._window_map.device_pages,
            nonfinite_rows=call.nonfinite_rows,
            sinks=call.sinks,
            out=call.out,
            partials=partials,
            table_rows=tree.rows,
            starts=tree.lens,
            bits=bits,
            indptr=None,
            prefix_lens=None if prefix is None else prefix.prefix_lens,
            q_stride=call.q.stride(0),
            bits_stride=0 if bits.shape[0] == 1 else bits.stride(0),
            first_row=0,
            rows_per_request=rows_per_request,
            width=tree.width,
            chunks=0,
            pages_per_request=pages.stride(0),
            first=call.first,
            window=call.window,
        )
        launch(
            attend.attend,
            (programs, self._kv_heads, splits),
            arguments,
            IS_PROMPT=False,
            HAS_SINKS=call.sinks is not None,
            MASK_WORDS=mask_words,
            SPLITS=splits,
            SKIP_PREFIX=prefix is not None,
            HAS_LOWER_LIMIT=call.window != 0 or call.first > 0 or prefix is not None,
            IS_CHUNKED=call.window < 0,
            MAX_CHUNKS=1,
            **blocks.constants,
            **self._constants,
        )
        if partials is not None:
            self._join(call, prefix, partials, rows_per_request)

    def _join(
        self, call: LayerCall, prefix: PrefixAttention | None, partials: Tensor | None = None, rows_per_request: int = 1
    ) -> None:
        """Merge the results of the splits (`partials`) and the attention over the prefix (`prefix`) into `call.out`;
        either may be None. If `partials` has n rows, the first n rows of `call.out` are written; if it is None, all
        rows. A request has `rows_per_request` rows.
        """
        rows, splits = (call.out.shape[0], 0) if partials is None else (partials.shape[0], partials.shape[2])
        values, lse, prefix_lens = prefix or (None, None, None)
        launch(
            join.join,
            (rows, self._heads),
            join.JoinArguments(
                partials, call.nonfinite_rows, call.sinks, values, lse, prefix_lens, call.out, rows_per_request
            ),
            HAS_SINKS=call.sinks is not None,
            HAS_PREFIX=prefix is not None,
            HEADS=self._heads,
            VALUE_DIM=self._value_dim,
            SPLITS=splits,
            SPLITS_AT_ONCE=max(1, min(splits, MAX_SPLITS_AT_ONCE)),
            **self._value_constants,
        )

    def _attend_text(self, call: LayerCall, text: PromptRows, first_row: int) -> None:
        """Attend the prompt rows, which begin at batch row `first_row`."""
        chunks, rows, pages = text.rows.shape[0], call.q.shape[0] - first_row, self._table.device_pages
        blocks = self._blocks(rows, is_prompt=True)
        # Chunk i needs ceil(rows_i * rep / lines) programs. `programs` is enough for all chunks, whatever their lengths
        # rows_i; surplus programs have no rows.
        programs = -(-rows * self._heads // self._kv_heads // blocks.lines) + chunks
        arguments = attend.AttendArguments(
            q=call.q,
            memory=call.memory,
            pages=pages,
            window_pages=None if self._window_map is None else self._window_map.device_pages,
            nonfinite_rows=call.nonfinite_rows,
            sinks=call.sinks,
            out=call.out,
            partials=None,
            table_rows=text.rows,
            starts=text.starts,
            bits=None,
            indptr=text.indptr,
            prefix_lens=None,
            q_stride=call.q.stride(0),
            bits_stride=0,
            first_row=first_row,
            rows_per_request=0,
            width=0,
            chunks=chunks,
            pages_per_request=pages.stride(0),
            first=call.first,
            window=call.window,
        )
        launch(
            attend.attend,
            (programs, self._kv_heads, 1),
            arguments,
            IS_PROMPT=True,
            HAS_SINKS=call.sinks is not None,
            MASK_WORDS=1,
            SPLITS=1,
            SKIP_PREFIX=False,
            HAS_LOWER_LIMIT=call.window != 0 or call.first > 0,
            IS_CHUNKED=call.window < 0,
            MAX_CHUNKS=next_power_of_2(chunks),
            **blocks.constants,
            **self._constants,
        )

    def _blocks(self, rows: int, is_prompt: bool = False, max_lines: int = 128) -> "Blocks":
        """Return the block sizes for requests of `rows` rows, with at most `max_lines` lines in one program."""
        heads_per_kv_head = self._heads // self._kv_heads
        if heads_per_kv_head & (heads_per_kv_head - 1):  # dividing by such a number takes registers (GLM-4.5: 12)
            max_lines = min(max_lines, 64)
        lines = min(max_lines, next_power_of_2(rows * heads_per_kv_head))
        return blocks_of(self._pool, lines, is_prompt)

    def _splits(self, programs_per_split: int) -> int:
        """Return into how many splits the positions are divided. A split has `programs_per_split` programs, and the
        programs of all splits should keep all processors busy. The number is at most `MAX_SPLITS`, and a power of two,
        because the kernel is compiled again for each number.
        """
        wanted_splits = max(1, 2 * self._processors // max(1, programs_per_split))
        return min(MAX_SPLITS, 1 << wanted_splits.bit_length() - 1)


class Blocks(NamedTuple):
    """Sizes of one program: `lines` (a line is one query head of one row), positions in a `tile`, `warps`, and pipeline
    `stages`.
    """

    lines: int
    tile: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The sizes under the names that a launch takes."""
        return {"LINES": self.lines, "TILE": self.tile, "num_warps": self.warps, "num_stages": self.stages}


def blocks_of(pool: KVPool, lines: int, is_prompt: bool) -> Blocks:
    """Return the block sizes for `lines` lines (query heads of rows) that share a KV head. `is_prompt` says whether
    they are rows of a prompt, not of a tree.

    Wide values need fewer lines, as their sums must fit in registers. Wide cells need smaller tiles; so do FP8 cells,
    which are decoded in registers. On an H100, the chosen sizes were the fastest of those that fit in registers. The
    sizes for heads wider than 128, for FP8 and for float32 were not measured. Those for float32 do not fit in
    registers.
    """
    key_dim, value_dim, is_fp8 = pool.cell.key_dim, pool.cell.value_dim, pool.fp8
    is_wide = pool.cell.is_latent or value_dim > 256
    if is_fp8 or pool.dtype.itemsize > 2 or (key_dim > 128 and not is_wide):
        lines = min(16 if is_wide else 64 if is_prompt or key_dim <= 128 else 32, lines)
        has_wide_sums = value_dim > 256 or (value_dim == 256 and (is_prompt or is_fp8 or pool.dtype.itemsize > 2))
        needs_many_warps = lines >= 64 or has_wide_sums
        needs_small_tiles = key_dim > 128 or pool.dtype.itemsize > 2 or (is_fp8 and not needs_many_warps)
        tile = 16 if is_fp8 and is_wide else 32 if needs_small_tiles else 64
        return Blocks(lines, tile, 8 if needs_many_warps else 4, 2 if needs_many_warps else 3)
    if is_wide:
        return Blocks(16, 32, 4, 3) if lines < 32 else Blocks(32, 64, 8, 2)
    if lines >= 64 and is_prompt:
        return Blocks(128, 128, 8, 2) if lines >= 128 else Blocks(64, 64, 4, 3)
    if lines >= 64:
        return Blocks(64, 32, 4, 5)
    return Blocks(lines, 64, 2 if lines == 16 and not is_prompt else 4, 4)


def processor_count(device: torch.device) -> int:
    """Return how many processors attention should keep busy: a GPU's multiprocessors, or, if Triton's interpreter runs
    the kernels, a constant.
    """
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
