"""Every program of Triton but attention, which is a stage of its own, in bfloat16 against its twin in float64.

What a program does not write stays NaN: all memory is filled with it before.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cluster.bench.report import median
from cluster.device.timing import timer_of
from cluster.kernels.interface import Activation, Angles, HeadNorms
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kernels.triton_kernels import TritonKernels
from cluster.kv.triton_pool import TritonPool
from cluster.sampling import filters
from cluster.sampling.noise import keys_along
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.torch_sampler import TORCH
from cluster.sampling.triton_sampler import TritonSampler, row_thresholds
from tests.gpu.stages.attention import attended, filled_with_nan, there
from tests.gpu.stages.stage import Stage, run
from tests.gpu.trees import check_trees
from tests.unit.attention.dense import Case
from tests.unit.sampling.test_c_sampler import draw_of, logits_of, unfiltered
from tests.unit.sampling.test_sampler import mixed

BF16 = torch.bfloat16


class Inputs:
    """New random numbers, on the device and as they are there in float64."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._dice = stage, torch.Generator().manual_seed(stage.seed)

    def __call__(self, *shape: int, times: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._dice) * times).to(BF16).to(self._stage.device)


def rows(stage: Stage, made: Inputs) -> None:
    own, twin = TritonKernels(), TorchKernels()
    count, size = stage.either((3, 200), (33, 2880))
    with stage.check("norm, add and norm") as facts:
        one, more, scale = made(count, size), made(count, size), made(size)
        total, normed = own.add_norm(one, more, scale, 1e-5)
        summed = (one.double() + more.double()).to(BF16).double()
        given = {"total": total, "normed": normed, "norm": own.norm(one, scale, 1e-5)}
        expected = {"total": one.double() + more.double(), "normed": twin.norm(summed, scale.double(), 1e-5)}
        stage.near(facts, given, expected | {"norm": twin.norm(one.double(), scale.double(), 1e-5)})
    with stage.check("rotate, norms of heads") as facts:
        turned = stage.either(16, 64)
        angles = Angles(made(count, 1, turned), made(count, 1, turned))
        wide = Angles(*(each.double() for each in angles))
        q, k = made(2 * turned), made(2 * turned)
        for norms, wider in (
            (None, None),
            (HeadNorms(5, q, k, 1e-6), HeadNorms(5, q.double(), k.double(), 1e-6)),
        ):
            heads = made(count, 7, 2 * turned)
            expected_heads = heads.double()
            own.rotate(heads, angles, norms)
            twin.rotate(expected_heads, wide, wider)
            stage.near(facts, {"heads": heads}, {"heads": expected_heads})
    for kind in (Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 7.0)):
        with stage.check(f"activate, {kind[0]}") as facts:
            both = made(count, 2 * size, times=4)
            stage.near(facts, {"out": own.activate(both, kind)}, {"out": twin.activate(both.double(), kind)})


def products(stage: Stage, made: Inputs) -> None:
    """Weights and experts: torch's products, and the programs that bring rows to experts and back."""
    own, twin = TritonKernels(), TorchKernels()
    with stage.check("products") as facts:
        inputs, outputs = stage.either((100, 60), (4096, 6144))
        matrix, given, bias = made(inputs, outputs, times=inputs**-0.5), made(7, inputs), made(outputs)
        weight = own.weight(matrix)
        expected = given.double() @ matrix.double()
        both = {"plain": weight(given), "with a bias": weight(given, bias)}
        stage.near(facts, both, {"plain": expected, "with a bias": expected + bias.double()})
    sizes = stage.either(((5, 2, 4, 48),), ((1, 8, 128, 768), (70, 4, 32, 2880), (3000, 6, 64, 1408)))
    for count, active, experts, size in sizes:
        with stage.check(f"experts, {active} of {experts}, {count} rows") as facts:
            chosen = torch.rand(count, experts, generator=torch.Generator().manual_seed(stage.seed)).topk(active, 1)
            groups, wide = own.group(chosen.indices.to(stage.device), experts), twin.group(chosen.indices, experts)
            for name, one, other in zip(wide._fields, groups, wide, strict=True):
                assert torch.equal(one.cpu(), other), name
            results, weights = made(count * active, size), made(count, active)
            out = own.combine(results, groups, weights, None)
            expected = twin.combine(results.double().cpu(), wide, weights.double().cpu(), None)
            stage.near(facts, {"out": out}, {"out": expected})
            assert torch.equal(out, own.combine(results, groups, weights, None)), "the same each time"
            stack = own.stack(made(experts, size, 64, times=size**-0.5))
            ends = torch.tensor([(chosen.indices <= e).sum() for e in range(experts)], dtype=torch.int32)
            taken = stack(results, ends.to(stage.device))
            begin = [0, *ends.tolist()[:-1]]
            expected = torch.cat(
                [
                    results[a:b].double() @ stack.dense()[e].double()
                    for e, (a, b) in enumerate(zip(begin, ends.tolist(), strict=True))
                ]
            )
            stage.near(facts, {"taken": taken}, {"taken": expected})


def choosing(stage: Stage) -> None:
    own, vocab = TritonSampler(), stage.either(300, 20000)
    for noisy in (False, True):
        with stage.check(f"choose, {'noise' if noisy else 'greedy'}") as facts:
            logits, draw = logits_of(6, vocab, BF16, seed=stage.seed), draw_of(unfiltered(2, BF16), 3, vocab, BF16)
            draw = draw if noisy else replace(draw, noise=None)
            every = TORCH.shard_best(SamplerInput(logits, [draw]), vocab)
            here = [there(draw, stage.device)]
            scores, columns, total = own.shard_best(SamplerInput(logits.to(stage.device), here), 5)
            by_column = torch.empty_like(every[0]).scatter_(1, every[1], every[0])
            given = {"scores": scores, "total": total, "of columns": by_column.gather(1, columns.cpu())}
            stage.near(facts, given, {"scores": every[0][:, :5], "total": every[2], "of columns": every[0][:, :5]})
            best, _ = own.best(SamplerInput(logits.to(stage.device), here))
            assert torch.equal(best.cpu(), columns[:, 0].cpu())
    with stage.check("thresholds of filters"):
        sampling = there(mixed(torch.float32), stage.device)
        count = sampling.seeds.shape[0]
        logits = logits_of(4 * count, vocab, BF16, seed=stage.seed).to(stage.device)
        wide = logits.float().view(count, 4, vocab) * sampling.inverse_temperature[:, None, None]
        least = row_thresholds(logits, SamplingInputs(4, sampling, None))
        assert torch.equal(least, filters.filter_thresholds(wide, sampling).view(-1, 1)), "to the bit"
    with stage.check("keys of noise"):
        seeds, first = torch.tensor([0, 2**63 - 1, -1, 7]), torch.tensor([0, 1, 2**40, 9])
        hashes = torch.zeros(3, dtype=torch.int32, device=stage.device)
        noise = own.noise(seeds.to(stage.device), first.to(stage.device), 9, hashes, torch.float32)
        assert torch.equal(noise.keys.cpu(), keys_along(seeds, first, 9))


def trees(stage: Stage) -> None:
    dice = torch.Generator().manual_seed(stage.seed)
    for k, steps, nodes in stage.either(((3, 3, 7),), ((4, 3, 16), (8, 5, 32), (10, 8, 60))):
        with stage.check(f"trees, {k} x {steps}, {nodes} nodes"):
            check_trees(stage.device, dice, k, steps, nodes)


def moves(stage: Stage, made: Inputs) -> None:
    with stage.check("compact windows"):
        pool = TritonPool(3, 64, (2, 2, 24), BF16, stage.device)
        pool.kv.copy_(made(*pool.kv.shape))
        before, to = pool.kv.clone(), torch.tensor([[1, 2, 3], [20, 21, 22]], device=stage.device)
        source = torch.tensor([[1, 5, 9], [23, 21, 30]], device=stage.device)
        pool.move_kv_cache(to, source)
        before[:, to.flatten()] = before[:, source.flatten()].clone()
        assert torch.equal(pool.kv, before)


def timings(stage: Stage, made: Inputs) -> None:
    """Attention and rows at the sizes of Llama-3.1-8B, each time with nothing of its inputs in the L2 cache."""
    own, timer = TritonKernels(), timer_of(stage.device)
    flush = torch.empty(stage.either(1 << 10, 1 << 28), dtype=torch.uint8, device=stage.device)
    for name, call, moved in timed_works(stage, made, own):
        with stage.check(f"time, {name}") as facts:
            spans = []
            for _ in range(stage.either(1, 3) + stage.either(2, 15)):
                flush.zero_()
                began = timer.now()
                call()
                spans.append((began, timer.now()))
            stage.wait()
            seconds = sorted(timer.between(*span) for span in spans[stage.either(1, 3) :])
            facts |= {"us": 1e6 * median(seconds), "us_least": 1e6 * seconds[0], "us_most": 1e6 * seconds[-1]}
            stage.say(figure={name: facts["us"], "unit": "us", "GB/s": moved / median(seconds) / 1e9})


def timed_works(stage: Stage, made: Inputs, own: TritonKernels) -> Iterator[tuple[str, Any, float]]:
    heads, kv_heads, d = stage.either((4, 2, 24), (32, 8, 128))
    loads = stage.either(((2, 20, 1),), ((1, 8192, 1), (16, 8192, 1), (16, 2048, 4), (16, 2048, 32), (64, 2048, 4)))
    for requests, context, each in loads:
        given = {"heads": heads, "kv_heads": kv_heads, "d": d, "page_size": 16, "lies": "scattered", "dtype": BF16}
        case = Held(**given, committed=(context,) * requests, parents=(-1, *range(each - 1)), chunks=())
        attention, q, kv = attended(case, stage), case.q.to(stage.device), case.kv.to(stage.device)
        moved = 2 * 2.0 * requests * (context + each) * kv_heads * d
        yield (
            f"attention, {requests} x {each} rows, {context}",
            lambda a=attention, q=q, kv=kv: a(1, q, kv, None),
            moved,
        )
    hidden, count = stage.either((64, 3), (4096, 64))
    one, more, scale, both = made(count, hidden), made(count, hidden), made(hidden), made(count, 7 * hidden)
    yield f"add and norm, {count} rows", lambda: own.add_norm(one, more, scale, 1e-5), 8.0 * one.numel()
    yield f"activate, {count} rows", lambda: own.activate(both, Activation()), 3.0 * both.numel()


class Held(Case):
    """A case with cells of random numbers everywhere: what is timed reads them all."""

    def filled(self) -> Any:
        pool = super().filled()
        pool.kv.normal_()
        return pool


def work(stage: Stage) -> None:
    filled_with_nan(stage)
    made = Inputs(stage)
    with torch.inference_mode():
        rows(stage, made)
        moves(stage, made)
        trees(stage)
        choosing(stage)
        products(stage, made)
        torch.use_deterministic_algorithms(False)
        timings(stage, made)


if __name__ == "__main__":
    raise SystemExit(run("kernels", work))
