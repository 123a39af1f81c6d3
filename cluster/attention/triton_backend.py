"""The attention primitive in Triton. It reads the page table and the pages in place, without copies.

Its results equal those of `TorchAttention` up to rounding. No launch argument depends on a length, so a CUDA graph can
hold the launches.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.attention.kernel_layout import fitting, with_rows_whole
from cluster.attention.shape import AttentionShape
from cluster.batch import AttentionMetadata, HostBounds, PromptRows, TreeRows
from cluster.kernels.attend import gpu as attend
from cluster.kernels.join import gpu as join
from cluster.kernels.launch import INTERPRETED, WIDE, launch, whole
from cluster.kernels.store import gpu as store
from cluster.kv.codes import largest
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool

LOG2E = attend.LOG2E.value
MOST_SPLITS = 64
JOINED = 16  # splits whose values fit a program's registers together
INTERPRETED_PROCESSORS = 4  # more than one, so that tests in the interpreter also run with splits


class Before(NamedTuple):
    """Attention of the first positions, computed by another library: values `out` `[T, nh, dv]` and log-sum-exps to
    base 2, `lse` `[T, nh]`. For tree rows, it covers the first `until[i]` positions of request i (`until` `[R]` int32);
    if `until[i]` is 0, `out` and `lse` of the request are not valid. If `until` is None, all rows are valid.
    """

    out: Tensor
    lse: Tensor
    until: Tensor | None = None


class LayerCall(NamedTuple):
    """One call of attention: q `[T, nh, d]` over a layer's cells in `memory` -> `out` `[T, nh * dv]`. `bad` `[T]` marks
    rows whose cells are not finite. `first` is as in `AttentionMetadata`; `window` is the sliding window, 0 for none.
    """

    q: Tensor
    memory: Tensor
    bad: Tensor
    sinks: Tensor | None
    out: Tensor
    first: int
    window: int


class TritonAttention:
    """Attention over one runner's pool, by Triton kernels."""

    def __init__(self, pool: KVPool, table: PageTable, shape: AttentionShape) -> None:
        """Bind to a pool. The arguments are as in `TorchAttention`."""
        parts, kv_heads, size = pool.cell
        heads, windows, self._scale, self._value_dim = shape.filled(pool)
        self._pool, self._table, self._heads, self._kv_heads = pool, table, heads, kv_heads
        self._windows = [window or 0 for window in windows]
        self._processors = processors_of(pool.kv.device)
        # Triton's blocks are powers of two, so a key of 576 numbers is read as FRONT = 512 and BACK = 64.
        front = 1 << (size.bit_length() - 1)
        self._wide = {"WIDTH": whole(self._value_dim), "WIDE": WIDE[pool.dtype]}
        self._constants: dict[str, Any] = {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "VALUE": self._value_dim,
            "CELL": prod(pool.kv.shape[2:]),
            "BEHIND": (parts - 1) * kv_heads * size,
            "NUMBERS": parts * kv_heads * size,
            "SCALES": (parts - 1) * kv_heads,
            "CODED": 0 if pool.coded is None else len(pool.coded.groups),
            "PAGE": table.page_size,
            "SCALE": self._scale * LOG2E,
            "FRONT": max(16, front),
            "BACK": whole(size - front) if size > front >= 16 else 0,
            "WIDEN": INTERPRETED and pool.dtype.itemsize == 2,
            **self._wide,
        }
        self._seen: AttentionMetadata | None = None

    def prepare(self, bounds: HostBounds) -> None:
        """Begin a step. The kernels read lengths on the device, so they need no bounds."""

    def bind(self, seen: AttentionMetadata) -> None:
        """Use `seen` for the calls of the next forward."""
        self._seen = seen

    def __call__(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write kv `[T, 2, nkv, d]` or `[T, 1, 1, d]` to the pool, then attend q `[T, nh, d]` -> `[T, nh * dv]`."""
        seen, count = self._seen, q.shape[0]
        assert seen is not None, "bound before it is called"
        (q, kv), memory = fitting(q, kv, self._pool), self._pool.kv[layer]
        bad = torch.empty(count, dtype=torch.int32, device=q.device)
        self._store(kv, seen.write, memory, bad)
        tree_rows = 0 if seen.tree is None else seen.tree.rows.shape[0] * seen.tree.bits.shape[1]
        # A step may be padded to more prompt rows than its chunks have. No kernel writes padded rows, so they start as
        # 0.
        make = q.new_empty if tree_rows == count else q.new_zeros
        out = make(count, self._heads * self._value_dim)
        call = LayerCall(q, memory, bad, sinks, out, seen.first, self._windows[layer])
        if seen.tree is not None:
            self._attend_tree(call, seen.tree)
        if seen.text is not None:
            self._attend_text(call, seen.text, tree_rows)
        return out

    def _store(self, kv: Tensor, write: Tensor, memory: Tensor, bad: Tensor) -> None:
        """Write new cells to slots `write`, and note in `bad` the rows whose cells are not finite."""
        numbers, coded = self._constants["NUMBERS"], self._pool.coded
        arguments = store.StoreArguments(kv, write, memory, bad, kv.stride(0))
        if coded is None:
            launch(store.store, (kv.shape[0],), arguments, CELL=numbers, BLOCK=whole(numbers))
            return
        (groups, size), *rest = coded.groups
        more = rest[0][1] if rest else 0
        launch(
            store.store_coded,
            (kv.shape[0],),
            store.StoreCodedArguments(*arguments, most=largest(self._pool.dtype)),
            NUMBERS=numbers,
            GROUPS=groups,
            SIZE=size,
            REST=more,
            BYTES=coded.nbytes,
            WIDE=self._wide["WIDE"],
            ALL=whole(numbers),
            BLOCK=whole(max(size, more)),
        )

    def _attend_tree(self, call: LayerCall, tree: TreeRows, before: Before | None = None) -> None:
        """Attend the tree's rows. If `before` is given, attend positions from `before.until` on, and merge both."""
        bits, pages = with_rows_whole(tree.bits), self._table.device_pages
        requests, (_, each, words) = tree.rows.shape[0], bits.shape
        # After `before`, little more than the window is left to read. The window is short, and its masks take
        # registers, so use fewer lines.
        blocks = self._blocks(each, most=128 if before is None else 32)
        # A request has ceil(each * rep / lines) tasks, with rep query heads for each KV head.
        tasks = requests * -(-each * self._heads // self._kv_heads // blocks.lines)
        splits = 1 if before is not None else self._splits(tasks * self._kv_heads)
        partials = None
        if splits > 1 or before is not None:
            shape = requests * each, self._heads, splits, self._constants["WIDTH"] + 2
            partials = call.q.new_empty(shape, dtype=torch.promote_types(call.q.dtype, torch.float32))
        arguments = attend.AttendArguments(
            q=call.q,
            memory=call.memory,
            pages=pages,
            bad=call.bad,
            sinks=call.sinks,
            out=call.out,
            partials=partials,
            tables=tree.rows,
            starts=tree.lens,
            bits=bits,
            indptr=None,
            until=None if before is None else before.until,
            q_stride=call.q.stride(0),
            bits_stride=0 if bits.shape[0] == 1 else bits.stride(0),
            first_row=0,
            each=each,
            width=tree.width,
            chunks=0,
            pages_each=pages.stride(0),
            first=call.first,
            window=call.window,
        )
        launch(
            attend.attend,
            (tasks, self._kv_heads, splits),
            arguments,
            TEXT=False,
            SINKS=call.sinks is not None,
            WORDS=words,
            SPLITS=splits,
            APART=before is not None,
            WINDOWED=max(call.window, call.first) > 0 or before is not None,
            CHUNKS=1,
            **blocks.constants,
            **self._constants,
        )
        if partials is not None:
            self._join(call, before, partials, each)

    def _join(self, call: LayerCall, before: Before | None, partials: Tensor | None = None, each: int = 1) -> None:
        """Merge `partials` and `before` into the first rows of `call.out`: those of `partials`, or all if it is None. A
        request has `each` rows.
        """
        rows, splits = (call.out.shape[0], 0) if partials is None else (partials.shape[0], partials.shape[2])
        values, lse, until = before or (None, None, None)
        launch(
            join.join,
            (rows, self._heads),
            join.JoinArguments(partials, call.bad, call.sinks, values, lse, until, call.out, each),
            SINKS=call.sinks is not None,
            BEFORE=before is not None,
            HEADS=self._heads,
            VALUE=self._value_dim,
            SPLITS=splits,
            AT_ONCE=max(1, min(splits, JOINED)),
            **self._wide,
        )

    def _attend_text(self, call: LayerCall, text: PromptRows, first_row: int) -> None:
        """Attend the prompt rows, which begin at batch row `first_row`."""
        chunks, rows, pages = text.rows.shape[0], call.q.shape[0] - first_row, self._table.device_pages
        blocks = self._blocks(rows, text=True)
        # At least sum_i ceil(rows_i * rep / lines), whatever the lengths rows_i; surplus tasks have no rows.
        tasks = -(-rows * self._heads // self._kv_heads // blocks.lines) + chunks
        arguments = attend.AttendArguments(
            q=call.q,
            memory=call.memory,
            pages=pages,
            bad=call.bad,
            sinks=call.sinks,
            out=call.out,
            partials=None,
            tables=text.rows,
            starts=text.starts,
            bits=None,
            indptr=text.indptr,
            until=None,
            q_stride=call.q.stride(0),
            bits_stride=0,
            first_row=first_row,
            each=0,
            width=0,
            chunks=chunks,
            pages_each=pages.stride(0),
            first=call.first,
            window=call.window,
        )
        launch(
            attend.attend,
            (tasks, self._kv_heads, 1),
            arguments,
            TEXT=True,
            SINKS=call.sinks is not None,
            WORDS=1,
            SPLITS=1,
            APART=False,
            WINDOWED=max(call.window, call.first) > 0,
            CHUNKS=whole(chunks),
            **blocks.constants,
            **self._constants,
        )

    def _blocks(self, rows: int, text: bool = False, most: int = 128) -> "Blocks":
        """Return the block sizes for requests of `rows` rows, with at most `most` lines at once."""
        lines = min(most, whole(rows * self._heads // self._kv_heads))
        return blocks_of(self._pool, self._value_dim, lines, text)

    def _splits(self, programs: int) -> int:
        """Return into how many splits to cut a prefix: enough that `programs` programs per split keep all processors
        busy. The number is a power of two, because the kernel is compiled for each value.
        """
        wanted = max(1, 2 * self._processors // max(1, programs))
        return min(MOST_SPLITS, 1 << wanted.bit_length() - 1)


class Blocks(NamedTuple):
    """Sizes of one program: `lines` (query heads of rows), positions in a `tile`, `warps`, and pipeline `stages`."""

    lines: int
    tile: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The sizes under the names that a launch takes."""
        return {"LINES": self.lines, "TILE": self.tile, "num_warps": self.warps, "num_stages": self.stages}


def blocks_of(pool: KVPool, value_dim: int, lines: int, text: bool) -> Blocks:
    """Return the block sizes for `lines` lines of a request that share a KV head; `text` if it is a prompt.

    Wide values need fewer lines, as their sums must fit in registers. Wide cells need smaller tiles, also FP8 ones,
    which are decoded in registers. The values are the fastest on an H100 among those that spill no registers. Heads
    wider than 128, FP8 and float32 were not measured, and float32 spills.
    """
    size, coded = pool.cell[2], pool.coded is not None
    wide = pool.cell[0] == 1 or value_dim > 256  # latents (one part: the key is also the value), or very wide heads
    if coded or pool.dtype.itemsize > 2 or (size > 128 and not wide):
        lines = min(16 if wide else 64 if text or size <= 128 else 32, lines)
        many = lines >= 64 or value_dim >= 256
        small = size > 128 or pool.dtype.itemsize > 2 or (coded and not many)
        tile = 16 if coded and wide else 32 if small else 64
        return Blocks(lines, tile, 8 if many else 4, 2 if many else 3)
    if wide:
        return Blocks(16, 32, 4, 3) if lines < 32 else Blocks(32, 64, 8, 2)
    if lines >= 64 and text:
        return Blocks(128, 128, 8, 2) if lines >= 128 else Blocks(64, 64, 4, 3)
    if lines >= 64:
        return Blocks(64, 32, 4, 5)
    return Blocks(lines, 64, 2 if lines == 16 and not text else 4, 4)


def processors_of(device: torch.device) -> int:
    """Return how many processors attention should keep busy: a GPU's multiprocessors, a constant if interpreted."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
