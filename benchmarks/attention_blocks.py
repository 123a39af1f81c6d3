"""Find the fastest blocks of the Triton attention kernel on this GPU: `python -m benchmarks.attention_blocks OUT`.

Nothing else may run on the GPU. Every variant (lines, positions per tile, warps, stages: `Blocks` of
`cluster/attention/triton_backend.py`) runs at loads of Llama-3.1-8B and DeepSeek. Its output is compared with that of
the backend's own choice of blocks. It is timed by CUDA events, with none of its KV cells in the L2 cache. Variants are
compiled by many processes first, so a sweep takes about a minute. OUT gets one line of JSON per variant. The fastest
variants of each load are printed, and the least possible time.

The environment variable `RATES` has the TB/s and TFLOP/s of the device, for the least possible time (default: H100).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cluster.kernels.launch
from cluster.arch.cell import Cell
from cluster.attention.ancestor_bits import chain_bits
from cluster.attention.shape import AttentionShape
from cluster.attention.triton_backend import Blocks, TritonAttention
from cluster.batch import AttentionMetadata, PromptRows, TreeRows
from cluster.bench.report import median
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool

PAGE = 16
MAX_CONTEXT = 16384
PROCESSES = 12
DEVICE = torch.device("cuda")


class Load(NamedTuple):
    """One call of attention. Each of `requests` requests has `each` rows after `context` tokens. If `requests` is 0,
    the call is for one prompt chunk of `each` rows after `context` tokens.

    There are `heads` query heads. A KV cell has `kv` heads of `size` numbers. In latent attention (MLA), the first
    `value` numbers of a cell are also its value. If `value` is None, keys and values are stored separately.
    """

    requests: int
    each: int
    context: int
    heads: int = 32
    kv: int = 8
    size: int = 128
    value: int | None = None

    @property
    def cell(self) -> Cell:
        """What the pool keeps of a token."""
        return Cell(self.kv, self.size, self.value or self.size, self.value is not None)

    @property
    def lines(self) -> int:
        """Query lines (row x head) of a request that share a KV head, rounded up to a power of two."""
        return max(16, 1 << (self.each * self.heads // self.kv - 1).bit_length())

    def least_us(self, bytes_s: float, flops: float) -> float:
        """Return the least microseconds: the longer of the time to read each cell once and the time of the products."""
        request_count = max(self.requests, 1)
        bytes_read = 2.0 * self.cell.numbers * request_count * (self.context + self.each)
        visible_tokens = self.context + (self.each if self.requests else self.each / 2)
        operations = (
            2.0 * request_count * self.each * visible_tokens * self.heads * (self.size + (self.value or self.size))
        )
        return 1e6 * max(bytes_read / bytes_s, operations / flops)


def latent_load(requests: int, each: int, context: int) -> Load:
    """Return a load of latent attention with an eighth of DeepSeek's heads."""
    return Load(requests, each, context, 16, 1, 576, 512)


LOADS = (
    *(Load(*one) for one in ((64, 32, 8192), (16, 32, 8192), (16, 32, 2048), (1, 32, 8192), (16, 8, 8192))),
    *(Load(*one) for one in ((64, 4, 8192), (16, 4, 2048), (64, 1, 8192), (16, 1, 2048), (1, 1, 8192))),
    *(Load(*one) for one in ((0, 2048, 0), (0, 512, 8192))),
    *(latent_load(*one) for one in ((64, 1, 8192), (16, 4, 8192), (16, 32, 2048), (1, 1, 8192), (0, 512, 2048))),
)
# Lines (0: all lines of a request that share a KV head), positions per tile, warps, stages.
MANY_LINES = (
    *((64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 5), (64, 128, 4, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 4)),
)
FEW_LINES = ((0, 64, 4, 3), (0, 64, 4, 4), (0, 64, 4, 5), (0, 128, 4, 3), (0, 64, 2, 4), (0, 32, 2, 5), (0, 64, 8, 4))
LATENT_BLOCKS = (
    *((16, 32, 8, 2), (16, 32, 8, 3), (16, 32, 4, 3), (16, 64, 8, 2), (32, 32, 8, 3), (32, 64, 8, 2)),
    *((64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2)),
)


def variants(load: Load) -> Iterator[Blocks | None]:
    """Yield the variants to try at a load. The first one, None, is the backend's own choice."""
    yield None
    shapes = LATENT_BLOCKS if load.value else MANY_LINES if load.lines >= 64 else FEW_LINES
    for lines, *rest in shapes:
        if lines <= load.lines:
            yield Blocks(lines or load.lines, *rest)


def bind_call(load: Load, blocks: Blocks | None, distinct_cells: bool) -> Callable[[], Tensor]:
    """Return a function that runs the attention of `load` with `blocks` (None: the backend's own choice) and returns
    its output. Unless `distinct_cells`, all requests share the same cells, which saves memory when only compilation
    matters.
    """
    request_count, pages = max(load.requests, 1), -(-(load.context + load.each) // PAGE)
    table = PageTable(request_count, MAX_CONTEXT, PAGE, DEVICE)
    page_count = request_count * pages if distinct_cells else pages
    pool = KVPool(1, (page_count + 1) * PAGE, load.cell, torch.bfloat16, DEVICE)
    pool.kv.normal_()
    page_order = torch.randperm(page_count, device=DEVICE).int() + 1
    table.device_pages[:request_count, :pages] = page_order.view(-1, pages)
    rows, positions = torch.arange(request_count, device=DEVICE), load.context + torch.arange(load.each, device=DEVICE)
    write_slots = (table.device_pages[rows][:, positions // PAGE].long() * PAGE + positions % PAGE).flatten()
    prefix_lens = torch.full((request_count,), load.context, device=DEVICE)
    if load.requests:
        bits = chain_bits(load.each, load.each, DEVICE).expand(request_count, -1, -1)
        metadata = AttentionMetadata(write_slots, TreeRows(rows, prefix_lens, bits, load.each))
    else:
        metadata = AttentionMetadata(
            write_slots, None, PromptRows(rows, prefix_lens, torch.tensor([0, load.each], device=DEVICE))
        )
    attention: Any = TritonAttention(pool, table, AttentionShape(load.heads))
    if blocks is not None:
        attention._blocks = lambda *_, **__: blocks
    attention.bind(metadata)
    q = torch.randn(request_count * load.each, load.heads, load.size, device=DEVICE).bfloat16()
    kv = torch.randn(request_count * load.each, *load.cell.shape, device=DEVICE).bfloat16()
    return lambda: attention(0, q, kv)


def compile_variants(jobs: list[tuple[int, Blocks | None]]) -> dict[tuple[int, Blocks | None], dict[str, int] | str]:
    """Compile each variant, which fills Triton's cache. Return its registers, spilled registers and shared memory, or
    the error.
    """
    launched: list[Any] = []

    def record_launch(program: Any, grid: Any, arguments: Any, constants: Any) -> None:
        launched.append(program[grid](*arguments, **constants))

    cluster.kernels.launch._launch_kernel = record_launch
    outcomes: dict[tuple[int, Blocks | None], dict[str, int] | str] = {}
    with torch.inference_mode():
        for job in jobs:
            try:
                launched.clear()
                bind_call(LOADS[job[0]], job[1], distinct_cells=False)()
                torch.cuda.synchronize()
                attend_program = next(each for each in launched if each.metadata.name == "attend")
                outcomes[job] = {
                    "registers": attend_program.n_regs,
                    "spilled": attend_program.n_spills,
                    "shared": attend_program.metadata.shared,
                }
            except Exception as error:
                outcomes[job] = f"{type(error).__name__}: {error}"[:200]
    return outcomes


def time_call_us(call: Callable[[], Tensor], flush: Tensor, repeats: int = 8) -> list[float]:
    """Return the sorted microseconds of the calls. The device sleeps before each call, so that the host is ahead."""
    event_pairs = []
    for _ in range(repeats + 2):
        flush.zero_()
        torch.cuda._sleep(400_000)
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        call()
        end_event.record()
        event_pairs.append((start_event, end_event))
    torch.cuda.synchronize()
    return sorted(1e3 * start_event.elapsed_time(end_event) for start_event, end_event in event_pairs[2:])


def main(out: Path) -> None:
    """Sweep all variants."""
    bytes_s, flops = (1e12 * float(rate) for rate in os.environ.get("RATES", "3.1 778").split())
    jobs = [(number, blocks) for number, load in enumerate(LOADS) for blocks in variants(load)]
    jobs_by_process: list[list[tuple[int, Blocks | None]]] = [[] for _ in range(PROCESSES)]
    for job in jobs:  # one process compiles all loads of a variant, because they may share a compiled program
        jobs_by_process[hash(job[1]) % PROCESSES].append(job)
    outcomes: dict[tuple[int, Blocks | None], dict[str, int] | str] = {}
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for process_outcomes in pool.map(compile_variants, jobs_by_process):
            outcomes |= process_outcomes
    flush = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)
    with out.open("w", encoding="utf-8") as file, torch.inference_mode():
        for number, load in enumerate(LOADS):
            expected, rows = None, []
            for blocks in variants(load):
                outcome = outcomes[number, blocks]
                if isinstance(outcome, str):
                    print(load, blocks, outcome)
                    continue
                torch.manual_seed(number)  # so that all variants get the same cells
                call = bind_call(load, blocks, distinct_cells=True)
                output = call().double()
                expected = output if expected is None else expected
                relative_error = float((output - expected).norm() / expected.norm())
                assert relative_error < 1e-2, (
                    f"{load}, {blocks}: relative error {relative_error} against the backend's own choice"
                )
                times_us = time_call_us(call, flush)
                row = {
                    "load": load._asdict(),
                    "blocks": blocks,
                    "us": median(times_us),
                    "least_us": times_us[0],
                    **outcome,
                }
                file.write(json.dumps(row) + "\n")
                rows.append((median(times_us), blocks, outcome["spilled"]))
            print(f"{load}: at least {load.least_us(bytes_s, flops):.1f} us")
            for us, blocks, spilled in sorted(rows, key=lambda row: row[0])[:4]:
                print(f"   {us:8.1f} {blocks or 'as it is'}, {spilled} registers spilled", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
