"""Calls the C kernels with many sizes, also odd ones, so that the results of two libraries can be compared.

`results` runs the calls in this process. `python -m tests.kernels.calls LEVEL LIBRARY [VARIANT]` runs them with another
library and prints the digest of each result, one per line.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.arch.cell import Cell
from cluster.attention.c_backend import CAttention
from cluster.capture.tape import Tape
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.c_operators import operators_of
from cluster.kernels.interface import Activation, Angles, HeadNorms
from cluster.kernels.library import Library, load_library
from cluster.kv.c_pool import CPool
from cluster.sampling.c_sampler import CSampler
from cluster.sampling.sampling_inputs import SamplerInput
from cluster.spec.c_chances import CNodeChances
from cluster.spec.c_lookup import TREE, CAddLookedUp, CLookupChances
from cluster.spec.c_row_budget import CSelectNodes
from cluster.spec.c_tree import growth_of
from cluster.spec.c_verify import CAccept
from cluster.spec.token_history import Continuations
from cluster.spec.tree import Proposed
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, make_case
from tests.unit.kernels.test_product import ROWS, SIZES, random_tensor
from tests.unit.kernels.test_quantised_product import KINDS as KINDS_OF_CODES
from tests.unit.kernels.test_quantised_product import SIZES as CODE_SIZES
from tests.unit.kernels.test_quantised_product import random_quantised_matrix
from tests.unit.sampling.test_c_sampler import random_inputs, random_logits, unfiltered_sampling
from tests.unit.spec.growth_contract import TREES, grow_levels, proposals

FUSED = (torch.float32, torch.float64, torch.bfloat16)


def operator_results(library: Library) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of a replayed tape in which C kernels replace the operators of torch."""
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        table, source = (random_tensor(rows, 5, dtype=torch.float32, seed=rows).mul(9).to(dtype) for rows in (9, 3))
        ids = torch.tensor([7, 0, 3])

        def program(table: Tensor = table, source: Tensor = source, ids: Tensor = ids) -> list[Tensor]:
            updated = table.index_copy(0, ids, source)
            counts = (updated - updated == 0).cumprod(1).sum(1)
            cells = updated[ids[:, None], torch.arange(4)], updated.gather(1, ids[None].expand(9, 3).remainder(5))
            return [
                updated.index_select(0, ids),
                torch.cat([updated, source]),
                counts,
                *cells,
                ids.repeat_interleave(3) + 1,
            ]

        tape = Tape(program, substitute=operators_of(library))
        tape.replay()
        yield from ((f"operators {dtype} {index}", tensor) for index, tensor in enumerate(tape.output))


def tree_results(library: Library) -> Iterator[tuple[str, Tensor]]:
    """Yield the results of the kernels of draft trees: growth, looked-up tokens, selection, acceptance, moves, and what
    is learned. Only chances are products, which depend on the level.
    """
    limits, sampled = torch.tensor([3, 0, 9]), torch.tensor([True, False, False])
    found = Continuations(torch.arange(24).view(3, 8) % 4, torch.tensor([2, 0, 16]))
    for dtype in (torch.float32, torch.float64):
        for k, steps, nodes in TREES:
            tokens, scores = proposals(3, k, steps, dtype)
            tokens = [torch.arange(k).expand_as(level_tokens) for level_tokens in tokens]  # siblings differ
            growth = growth_of(library)(tokens[0], scores[0], steps)
            rows = grow_levels(growth, tokens, scores)
            drafted = growth.tree(limits, nodes)
            assert drafted.scores is not None and drafted.candidates is not None
            drafted = replace(drafted, proposed=Proposed(drafted.scores, F.pad(drafted.candidates % k == 0, (1, 0))))
            lookup = CLookupChances(library, limits.device)
            tree = CAddLookedUp(library)(drafted, found, lookup.log_chances(found.matched, 8))
            assert tree.scores is not None
            selection = CSelectNodes(library)(tree.scores, tree.depths, limits, 3 * nodes)
            accepted = CAccept(library)(tree, (tree.tokens + 1) % 4, limits[:0], 8)
            chances = CNodeChances(library, limits.device)
            chances.count(tree, accepted, sampled, limits)
            lookup.count(found.matched, accepted.accept_len - 1, accepted.accept_len, limits)
            pool = CPool(2, 40, Cell(1, 3, 3), dtype, limits.device, library=library)
            pool.kv.copy_(random_tensor(*pool.kv.shape, dtype=dtype))
            pool.move_kv_cache(torch.arange(27).view(3, 9), torch.arange(27).view(3, 9).flip(1))
            results_of_tree = [
                *rows,
                *(getattr(tree, name) for name in TREE),
                pool.kv,
                selection.nodes,
                selection.ranks,
            ]
            results_of_tree += [accepted.path, accepted.tokens, accepted.accept_len]
            counts = [chances.trials, chances.hits, lookup.trials, lookup.hits]
            yield from ((f"operators tree {dtype} {k} {i}", x) for i, x in enumerate([*results_of_tree, *counts]))
            yield f"chances {dtype} {k}", chances.log_chances(scores[0], sampled)


def results(library: Library) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the result of every call."""
    yield from operator_results(library)
    yield from tree_results(library)
    kernels = CKernels(library)
    for dtype in FUSED:
        for size in SIZES:
            weight, stack = (
                kernels.weight(random_tensor(*size, dtype=dtype)),
                kernels.stack(random_tensor(3, *size, dtype=dtype)),
            )
            for rows in ROWS:
                given = random_tensor(rows, size[0], dtype=dtype, seed=1)
                yield f"product {dtype} {size} {rows}", weight(given, random_tensor(size[1], dtype=dtype, seed=2))
                ends = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)
                yield f"stack {dtype} {size} {rows}", stack(given, ends)
        for kind, zeros in KINDS_OF_CODES:
            for inputs, outputs, group in CODE_SIZES:
                packed = kernels.quantised(random_quantised_matrix(kind, inputs, outputs, group, zeros), dtype)
                for rows in ROWS[:9]:
                    name = f"codes {kind} {zeros} {dtype} {inputs} {outputs} {rows}"
                    yield (
                        name,
                        packed(
                            random_tensor(rows, inputs, dtype=dtype, seed=1),
                            random_tensor(outputs, dtype=dtype, seed=2),
                        ),
                    )
        for size in (1, 7, 16, 65, 256, 500):
            rows, scale = random_tensor(9, size, dtype=dtype), random_tensor(size, dtype=dtype, seed=1)
            yield f"norm {dtype} {size}", torch.stack(kernels.add_norm(rows, rows + 1, scale, 1e-5))
            for kind in (
                Activation(),
                Activation("gelu_tanh"),
                Activation("clamped", 1.702, 1.5),
                Activation("clamped_silu", limit=0.5),
            ):
                yield f"{kind} {dtype} {size}", kernels.activate(4 * random_tensor(9, 2 * size, dtype=dtype), kind)
        for size, rotary_size in ((4, 4), (10, 6), (64, 64), (96, 32)):
            heads = random_tensor(9, 5, size, dtype=dtype)
            angles = Angles(*(random_tensor(9, 1, rotary_size, dtype=dtype, seed=seed) for seed in (1, 2)))
            norms = HeadNorms(3, *(random_tensor(size, dtype=dtype, seed=seed) for seed in (3, 4)), 1e-6)
            kernels.rotate(heads, angles, norms)
            yield f"rotary {dtype} {size}", heads
        for vocab in (1, 7, 33, 2049, 5000):
            logits, draw = (
                random_logits(12, vocab, dtype),
                random_inputs(unfiltered_sampling(4, dtype), 3, vocab, dtype),
            )
            for draws in ([draw], [replace(draw, noise=None)]):
                chosen = CSampler(library).shard_best(SamplerInput(logits, draws), min(vocab, 9))
                yield f"choice {dtype} {vocab} {draws[0].noise is None}", torch.cat(chosen, 1)
    for shape in SHAPES:
        for kind in KINDS:
            yield (
                f"attend {shape} {kind}",
                make_case(shape, kind, 4, "tail").backend_output(make=partial(CAttention, library=library)),
            )
    for dtype in FUSED[::2]:
        for kind in ("FP8", "FP8, latent", "wide window"):
            given = {"heads": 4, "kv_heads": 2} | SHAPES["all"] | KINDS[kind]
            attention_case = Case(page_size=4, lies="tail", dtype=dtype, d=40, **given)
            yield f"attend {dtype} {kind}", attention_case.backend_output(make=partial(CAttention, library=library))


def digests(library: Library) -> dict[str, str]:
    """Return the digest of each result, by the name of the call."""
    return {name: sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()[:12] for name, out in results(library)}


if __name__ == "__main__":
    torch.set_num_threads(2)
    level, path, *variants = sys.argv[1:]
    library = load_library(level, Path(path), *variants)
    assert [library.variant] == (variants or [""])
    for name, digest in digests(library).items():
        print(f"{digest} {name}")
