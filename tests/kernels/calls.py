"""Calls of every C kernel on odd sizes, as bytes: run in this process, or in one with another library.

`python -m tests.kernels.calls LEVEL LIBRARY [VARIANT]` prints their digests, one line each.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from cluster.attention.c_backend import CAttention
from cluster.capture.tape import Tape
from cluster.kernels.c_kernels import CKernels
from cluster.kernels.c_operators import operators_of
from cluster.kernels.interface import Activation, Angles, HeadNorms
from cluster.kernels.library import Library, load_library
from cluster.sampling.c_sampler import CSampler
from cluster.sampling.sampling_inputs import SamplerInput
from tests.unit.attention.dense import Case
from tests.unit.attention.test_gather_methods import KINDS, SHAPES, case
from tests.unit.kernels.test_product import ROWS, SIZES, made
from tests.unit.kernels.test_quantised_product import KINDS as KINDS_OF_CODES
from tests.unit.kernels.test_quantised_product import SIZES as CODE_SIZES
from tests.unit.kernels.test_quantised_product import matrix
from tests.unit.sampling.test_c_sampler import draw_of, logits_of, unfiltered

FUSED = (torch.float32, torch.float64, torch.bfloat16)


def of_operators(library: Library) -> Iterator[tuple[str, Tensor]]:
    """What C gives in place of torch's operators, in a replayed program."""
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        table, given = (made(rows, 5, dtype=torch.float32, seed=rows).mul(9).to(dtype) for rows in (9, 3))
        ids = torch.tensor([7, 0, 3])

        def program(table: Tensor = table, given: Tensor = given, ids: Tensor = ids) -> list[Tensor]:
            own = table.index_copy(0, ids, given)
            counts = (own - own == 0).cumprod(1).sum(1)
            cells = own[ids[:, None], torch.arange(4)], own.gather(1, ids[None].expand(9, 3).remainder(5))
            return [own.index_select(0, ids), torch.cat([own, given]), counts, *cells, ids.repeat_interleave(3) + 1]

        tape = Tape(program, substitute=operators_of(library))
        tape.replay()
        yield from ((f"operators {dtype} {at}", one) for at, one in enumerate(tape.output))


def results(library: Library) -> Iterator[tuple[str, Tensor]]:
    """The name and the result of every call."""
    yield from of_operators(library)
    kernels = CKernels(library)
    for dtype in FUSED:
        for size in SIZES:
            weight, stack = kernels.weight(made(*size, dtype=dtype)), kernels.stack(made(3, *size, dtype=dtype))
            for rows in ROWS:
                given = made(rows, size[0], dtype=dtype, seed=1)
                yield f"product {dtype} {size} {rows}", weight(given, made(size[1], dtype=dtype, seed=2))
                ends = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)
                yield f"stack {dtype} {size} {rows}", stack(given, ends)
        for kind, zeros in KINDS_OF_CODES:
            for inputs, outputs, group in CODE_SIZES:
                packed = kernels.quantised(matrix(kind, inputs, outputs, group, zeros), dtype)
                for rows in ROWS[:9]:
                    name = f"codes {kind} {zeros} {dtype} {inputs} {outputs} {rows}"
                    yield name, packed(made(rows, inputs, dtype=dtype, seed=1), made(outputs, dtype=dtype, seed=2))
        for size in (1, 7, 16, 65, 256, 500):
            rows, scale = made(9, size, dtype=dtype), made(size, dtype=dtype, seed=1)
            yield f"norm {dtype} {size}", torch.stack(kernels.add_norm(rows, rows + 1, scale, 1e-5))
            for kind in (Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 1.5)):
                yield f"{kind} {dtype} {size}", kernels.activate(4 * made(9, 2 * size, dtype=dtype), kind)
        for size, turned in ((4, 4), (10, 6), (64, 64), (96, 32)):
            heads = made(9, 5, size, dtype=dtype)
            angles = Angles(*(made(9, 1, turned, dtype=dtype, seed=seed) for seed in (1, 2)))
            norms = HeadNorms(3, *(made(size, dtype=dtype, seed=seed) for seed in (3, 4)), 1e-6)
            kernels.rotate(heads, angles, norms)
            yield f"rotary {dtype} {size}", heads
        for vocab in (1, 7, 33, 2049, 5000):
            logits, draw = logits_of(12, vocab, dtype), draw_of(unfiltered(4, dtype), 3, vocab, dtype)
            for draws in ([draw], [replace(draw, noise=None)]):
                found = CSampler(library).shard_best(SamplerInput(logits, draws), min(vocab, 9))
                yield f"choice {dtype} {vocab} {draws[0].noise is None}", torch.cat(found, 1)
    for shape in SHAPES:
        for kind in KINDS:
            yield (
                f"attend {shape} {kind}",
                case(shape, kind, 4, "tail").given(make=partial(CAttention, library=library)),
            )
    for dtype in FUSED[::2]:
        for kind in ("FP8", "FP8, latent", "wide window"):
            given = {"heads": 4, "kv_heads": 2} | SHAPES["all"] | KINDS[kind]
            one = Case(page_size=4, lies="tail", dtype=dtype, d=40, **given)
            yield f"attend {dtype} {kind}", one.given(make=partial(CAttention, library=library))


def digests(library: Library) -> dict[str, str]:
    """The digest of every result."""
    return {name: sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()[:12] for name, out in results(library)}


if __name__ == "__main__":
    torch.set_num_threads(2)
    level, path, *variants = sys.argv[1:]
    library = load_library(level, Path(path), *variants)
    assert [library.variant] == (variants or [""])
    for name, digest in digests(library).items():
        print(f"{digest} {name}")
