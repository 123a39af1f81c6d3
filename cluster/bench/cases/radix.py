"""`aerie bench radix`: CPU time of radix tree operations inside a step, at the size of a real cache.

The figures are milliseconds, not ratios, and have goals: all ranks of a gang wait while one rank evicts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cluster.bench.goals import Goal
from cluster.bench.report import Say, machine, median, table
from cluster.kv.cache import KVCache
from cluster.kv.page_table import PageTable
from cluster.kv.radix import RadixTree

PAGE = 16
EVICTED = 4


@dataclass(frozen=True, slots=True)
class Size:
    """`chain`: pages of one long text. `pages`: pages of a tree of many texts. `repeats`: runs of each measurement."""

    chain: int = 8192
    pages: int = 50_000
    repeats: int = 15


QUICK = Size(chain=1024, pages=5000, repeats=5)
CHAIN_GOAL_MS = 20.0
TREE_GOAL_MS = 0.2


def measure(size: Size, say: Say = lambda _: None) -> dict[str, Any]:
    """Return the CPU milliseconds of each operation: the median and the maximum over the repeats."""
    rows = []
    for name, goal, run in _operations(size):
        say(f"radix: {name}")
        taken = [run() * 1e3 for _ in range(size.repeats)]
        rows.append({"operation": name, "median_ms": median(taken), "most_ms": max(taken), "goal_ms": goal})
    return {"what": "radix", "machine": machine(), "page_size": PAGE, "repeats": size.repeats, "rows": rows}


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the goals, in CPU milliseconds, of the operations that have one."""
    rows = [row for row in result["rows"] if row["goal_ms"] is not None]
    return [Goal(f"{row['operation']}, ms of CPU", row["median_ms"], row["goal_ms"]) for row in rows]


def show(result: dict[str, Any]) -> str:
    """Return the result as text."""
    # Format with three decimals here, because `table` shows two.
    rows = [[f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row.values()] for row in result["rows"]]
    where = result["machine"]
    head = (
        f"radix: pages of {result['page_size']} tokens, milliseconds of CPU, {result['repeats']} repeats\n"
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']}"
    )
    return f"{head}\n{table(['operation', 'median', 'most', 'goal'], rows)}"


def _operations(size: Size) -> list[tuple[str, float | None, Callable[[], float]]]:
    """Return, for each operation, its name, its goal in milliseconds, and a function that measures the operation once
    and returns seconds.
    """
    text = list(range(size.chain * PAGE + 1))
    prompts = _family(size.pages)
    grown = _tree_of(prompts)

    def chain() -> float:
        tree = RadixTree(PAGE)
        tree.insert(text, range(size.chain))
        return _cpu(lambda: tree.evict(size.chain))

    def family() -> float:
        taken = _cpu(lambda: grown.evict(EVICTED))
        for prompt in prompts[:EVICTED]:  # restore the tree's size for the next repeat
            grown.insert(prompt, range(len(prompt) // PAGE))
        return taken

    def flat() -> float:
        tree = RadixTree(PAGE)
        for start in range(size.pages):
            tree.insert([start, *range(PAGE)], [start])
        return _cpu(lambda: tree.evict(EVICTED))

    cache = KVCache(size.chain + 8, PageTable(2, len(text) + PAGE, PAGE, torch.device("cpu")), radix=True)
    lease = cache.open(text, len(text))
    assert lease is not None, "an empty cache holds a request"
    cache.close(lease, text, len(text))

    def opened() -> float:
        leases = []
        taken = _cpu(lambda: leases.append(cache.open(text, len(text))))
        assert leases[0] is not None
        cache.close(leases[0], text, len(text))
        return taken

    return [
        (f"evict {size.chain} pages of one chain", CHAIN_GOAL_MS, chain),
        (f"evict {EVICTED} of {grown.pages} pages, {len(prompts)} texts", TREE_GOAL_MS, family),
        (f"evict {EVICTED} of {size.pages} pages that share nothing", TREE_GOAL_MS, flat),
        (f"find and lock a prefix of {size.chain} pages", None, opened),
    ]


def _family(pages: int) -> list[list[int]]:
    """Return texts of about `pages` pages in total. Each group of ten texts shares its first five pages; then each text
    has a hundred pages of its own.
    """
    prompts: list[list[int]] = []
    for number in range(max(1, pages // 100)):
        shared = [number // 10] * (5 * PAGE)
        prompts.append([*shared, number + 7, *range(100 * PAGE)])
    return prompts


def _tree_of(prompts: Sequence[Sequence[int]]) -> RadixTree:
    tree, pages = RadixTree(PAGE), 0
    for prompt in prompts:
        count = len(prompt) // PAGE
        tree.insert(prompt, range(pages, pages + count))
        pages += count
    return tree


def _cpu(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began
