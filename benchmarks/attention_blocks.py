"""Which shapes of attention's programs are fastest on the GPU at hand: `python -m benchmarks.attention_blocks OUT`.

Run alone on the GPU. Every variant (lines, positions of a tile, warps, stages: `Blocks` of
`cluster/attention/triton_backend.py`) at loads of Llama-3.1-8B and DeepSeek, each held to the shape that the backend
takes by itself, and timed by events with nothing of its cells in the L2 cache. Variants are compiled by many processes
first, so a sweep takes about a minute. A line of JSON for each is written to OUT; what is fastest at each load is
printed, beside the least possible.

`RATES` in the environment: TB/s and TFLOP/s of the device, for the least possible; an H100's unless it is given.
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
from cluster.attention.ancestor_bits import line_bits
from cluster.attention.triton_backend import Blocks, TritonAttention
from cluster.batch import AttentionMetadata, PromptRows, TreeRows
from cluster.bench.report import median
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool

PAGE = 16
LONGEST = 16384
PROCESSES = 12
DEVICE = torch.device("cuda")


class Load(NamedTuple):
    """`requests` of `each` rows after `context` tokens; 0 requests: a prompt's chunk of so many rows.

    Cells of `kv` heads of `size` numbers; `value` numbers of a latent are its value, None: keys and values apart.
    """

    requests: int
    each: int
    context: int
    heads: int = 32
    kv: int = 8
    size: int = 128
    value: int | None = None

    @property
    def cell(self) -> tuple[int, int, int]:
        """The shape of a token's cell."""
        return (2, self.kv, self.size) if self.value is None else (1, 1, self.size)

    @property
    def lines(self) -> int:
        """Query heads of a request that share a KV head, as a power of two."""
        return max(16, 1 << (self.each * self.heads // self.kv - 1).bit_length())

    def least_us(self, bytes_s: float, flops: float) -> float:
        """The longer of reading the cells once and of multiplying."""
        held = max(self.requests, 1)
        read = 2.0 * self.cell[0] * self.kv * self.size * held * (self.context + self.each)
        seen = self.context + (self.each if self.requests else self.each / 2)
        computed = 2.0 * held * self.each * seen * self.heads * (self.size + (self.value or self.size))
        return 1e6 * max(read / bytes_s, computed / flops)


def latent(requests: int, each: int, context: int) -> Load:
    """An eighth of DeepSeek's heads."""
    return Load(requests, each, context, 16, 1, 576, 512)


LOADS = (
    *(Load(*one) for one in ((64, 32, 8192), (16, 32, 8192), (16, 32, 2048), (1, 32, 8192), (16, 8, 8192))),
    *(Load(*one) for one in ((64, 4, 8192), (16, 4, 2048), (64, 1, 8192), (16, 1, 2048), (1, 1, 8192))),
    *(Load(*one) for one in ((0, 2048, 0), (0, 512, 8192))),
    *(latent(*one) for one in ((64, 1, 8192), (16, 4, 8192), (16, 32, 2048), (1, 1, 8192), (0, 512, 2048))),
)
# Lines (0: all of a request that share a KV head), positions of a tile, warps, stages.
MANY = (
    *((64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 5), (64, 128, 4, 3)),
    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 4)),
)
FEW = ((0, 64, 4, 3), (0, 64, 4, 4), (0, 64, 4, 5), (0, 128, 4, 3), (0, 64, 2, 4), (0, 32, 2, 5), (0, 64, 8, 4))
OVER_LATENTS = (
    *((16, 32, 8, 2), (16, 32, 8, 3), (16, 32, 4, 3), (16, 64, 8, 2), (32, 32, 8, 3), (32, 64, 8, 2)),
    *((64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2)),
)


def variants(load: Load) -> Iterator[Blocks | None]:
    """None is what the backend takes by itself."""
    yield None
    tried = OVER_LATENTS if load.value else MANY if load.lines >= 64 else FEW
    for lines, *rest in tried:
        if lines <= load.lines:
            yield Blocks(lines or load.lines, *rest)


def bound(load: Load, blocks: Blocks | None, real: bool) -> Callable[[], Tensor]:
    """A call of attention; not `real`: every request has the same cells, as only compiling matters."""
    held, pages = max(load.requests, 1), -(-(load.context + load.each) // PAGE)
    table = PageTable(held, LONGEST, PAGE, DEVICE)
    count = held * pages if real else pages
    pool = KVPool(1, (count + 1) * PAGE, load.cell, torch.bfloat16, DEVICE)
    pool.kv.normal_()
    places = torch.randperm(count, device=DEVICE).int() + 1
    table.device_pages[:held, :pages] = places.view(-1, pages)
    rows, at = torch.arange(held, device=DEVICE), load.context + torch.arange(load.each, device=DEVICE)
    write = (table.device_pages[rows][:, at // PAGE].long() * PAGE + at % PAGE).flatten()
    starts = torch.full((held,), load.context, device=DEVICE)
    if load.requests:
        bits = line_bits(load.each, load.each, DEVICE).expand(held, -1, -1)
        seen = AttentionMetadata(write, TreeRows(rows, starts, bits, load.each))
    else:
        seen = AttentionMetadata(write, None, PromptRows(rows, starts, torch.tensor([0, load.each], device=DEVICE)))
    attention: Any = TritonAttention(pool, table, load.heads, (None,), None, load.value)
    if blocks is not None:
        attention._blocks = lambda *_, **__: blocks
    attention.bind(seen)
    q = torch.randn(held * load.each, load.heads, load.size, device=DEVICE).bfloat16()
    kv = torch.randn(held * load.each, *load.cell, device=DEVICE).bfloat16()
    return lambda: attention(0, q, kv)


def compiled(jobs: list[tuple[int, Blocks | None]]) -> dict[tuple[int, Blocks | None], dict[str, int] | str]:
    """Compile each, for Triton's cache; its program's registers, spilled ones and shared memory, or why it has none."""
    started: list[Any] = []

    def noted(program: Any, grid: Any, given: Any, constants: Any) -> None:
        started.append(program[grid](*given, **constants))

    cluster.kernels.launch._started = noted
    found: dict[tuple[int, Blocks | None], dict[str, int] | str] = {}
    with torch.inference_mode():
        for job in jobs:
            try:
                started.clear()
                bound(LOADS[job[0]], job[1], real=False)()
                torch.cuda.synchronize()
                one = next(each for each in started if each.metadata.name == "attend")
                found[job] = {"registers": one.n_regs, "spilled": one.n_spills, "shared": one.metadata.shared}
            except Exception as error:
                found[job] = f"{type(error).__name__}: {error}"[:200]
    return found


def microseconds(call: Callable[[], Tensor], flush: Tensor, repeats: int = 8) -> list[float]:
    """Sorted; the device is kept waiting before each, so that the host is ahead of it."""
    spans = []
    for _ in range(repeats + 2):
        flush.zero_()
        torch.cuda._sleep(400_000)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        spans.append((began, ended))
    torch.cuda.synchronize()
    return sorted(1e3 * began.elapsed_time(ended) for began, ended in spans[2:])


def main(out: Path) -> None:
    """Sweep all variants."""
    bytes_s, flops = (1e12 * float(one) for one in os.environ.get("RATES", "3.1 778").split())
    jobs = [(number, blocks) for number, load in enumerate(LOADS) for blocks in variants(load)]
    parts: list[list[tuple[int, Blocks | None]]] = [[] for _ in range(PROCESSES)]
    for job in jobs:  # loads that share a variant in one process, as they may share a program
        parts[hash(job[1]) % PROCESSES].append(job)
    made: dict[tuple[int, Blocks | None], dict[str, int] | str] = {}
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for each in pool.map(compiled, parts):
            made |= each
    flush = torch.empty(1 << 27, dtype=torch.uint8, device=DEVICE)
    with out.open("w", encoding="utf-8") as file, torch.inference_mode():
        for number, load in enumerate(LOADS):
            expected, rows = None, []
            for blocks in variants(load):
                facts = made[number, blocks]
                if isinstance(facts, str):
                    print(load, blocks, facts)
                    continue
                torch.manual_seed(number)  # the same cells for each
                call = bound(load, blocks, real=True)
                given = call().double()
                expected = given if expected is None else expected
                away = float((given - expected).norm() / expected.norm())
                assert away < 1e-2, f"{load}, {blocks}: {away} from what the backend gives by itself"
                spent = microseconds(call, flush)
                row = {"load": load._asdict(), "blocks": blocks, "us": median(spent), "least_us": spent[0], **facts}
                file.write(json.dumps(row) + "\n")
                rows.append((median(spent), blocks, facts["spilled"]))
            print(f"{load}: at least {load.least_us(bytes_s, flops):.1f} us")
            for us, blocks, spilled in sorted(rows, key=lambda row: row[0])[:4]:
                print(f"   {us:8.1f} {blocks or 'as it is'}, {spilled} registers spilled", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
