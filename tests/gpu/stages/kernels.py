"""Compares every Triton kernel in bfloat16 with its PyTorch reference in float64. Attention has a stage of its own.

All memory is filled with NaN first, so a value that a kernel does not write stays NaN.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cluster.arch.cell import Cell
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
from tests.gpu.stages.attention import bound_attention, filled_with_nan, to_device
from tests.gpu.stages.stage import Stage, run
from tests.gpu.trees import check_trees
from tests.unit.attention.dense import Case
from tests.unit.sampling.test_c_sampler import random_inputs, random_logits, unfiltered_sampling
from tests.unit.sampling.test_sampler import mixed_sampling

BF16 = torch.bfloat16


class RandomTensors:
    """Makes new random bfloat16 tensors on the device."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._generator = stage, torch.Generator().manual_seed(stage.seed)

    def __call__(self, *shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * factor).to(BF16).to(self._stage.device)


def rows(stage: Stage, random_tensor: RandomTensors) -> None:
    kernels, reference = TritonKernels(), TorchKernels()
    count, size = stage.dry_or_gpu((3, 200), (33, 2880))
    with stage.check("norm, add and norm") as facts:
        hidden, residual, scale = random_tensor(count, size), random_tensor(count, size), random_tensor(size)
        total, normed = kernels.add_norm(hidden, residual, scale, 1e-5)
        summed = (hidden.double() + residual.double()).to(BF16).double()
        actual = {"total": total, "normed": normed, "norm": kernels.norm(hidden, scale, 1e-5)}
        expected = {
            "total": hidden.double() + residual.double(),
            "normed": reference.norm(summed, scale.double(), 1e-5),
        }
        stage.check_close(facts, actual, expected | {"norm": reference.norm(hidden.double(), scale.double(), 1e-5)})
    with stage.check("rotate, norms of heads") as facts:
        rotary_size = stage.dry_or_gpu(16, 64)
        angles = Angles(random_tensor(count, 1, rotary_size), random_tensor(count, 1, rotary_size))
        wide_angles = Angles(*(angle.double() for angle in angles))
        q, k = random_tensor(2 * rotary_size), random_tensor(2 * rotary_size)
        for norms, wide_norms in (
            (None, None),
            (HeadNorms(5, q, k, 1e-6), HeadNorms(5, q.double(), k.double(), 1e-6)),
        ):
            heads = random_tensor(count, 7, 2 * rotary_size)
            expected_heads = heads.double()
            kernels.rotate(heads, angles, norms)
            reference.rotate(expected_heads, wide_angles, wide_norms)
            stage.check_close(facts, {"heads": heads}, {"heads": expected_heads})
    for kind in (Activation(), Activation("gelu_tanh"), Activation("clamped", 1.702, 7.0)):
        with stage.check(f"activate, {kind[0]}") as facts:
            gate_up = random_tensor(count, 2 * size, factor=4)
            stage.check_close(
                facts, {"out": kernels.activate(gate_up, kind)}, {"out": reference.activate(gate_up.double(), kind)}
            )


def products(stage: Stage, random_tensor: RandomTensors) -> None:
    """Check matrix products of weights and experts, and the kernels that group rows by expert and combine results."""
    kernels, reference = TritonKernels(), TorchKernels()
    with stage.check("products") as facts:
        inputs, outputs = stage.dry_or_gpu((100, 60), (4096, 6144))
        matrix, activations, bias = (
            random_tensor(inputs, outputs, factor=inputs**-0.5),
            random_tensor(7, inputs),
            random_tensor(outputs),
        )
        weight = kernels.weight(matrix)
        expected = activations.double() @ matrix.double()
        actual = {"plain": weight(activations), "with a bias": weight(activations, bias)}
        stage.check_close(facts, actual, {"plain": expected, "with a bias": expected + bias.double()})
    sizes = stage.dry_or_gpu(((5, 2, 4, 48),), ((1, 8, 128, 768), (70, 4, 32, 2880), (3000, 6, 64, 1408)))
    for count, active, experts, size in sizes:
        with stage.check(f"experts, {active} of {experts}, {count} rows") as facts:
            top_experts = torch.rand(count, experts, generator=torch.Generator().manual_seed(stage.seed)).topk(
                active, 1
            )
            groups, expected_groups = (
                kernels.group(top_experts.indices.to(stage.device), experts),
                reference.group(top_experts.indices, experts),
            )
            for name, device_tensor, expected_tensor in zip(
                expected_groups._fields, groups, expected_groups, strict=True
            ):
                assert torch.equal(device_tensor.cpu(), expected_tensor), name
            results, weights = random_tensor(count * active, size), random_tensor(count, active)
            out = kernels.combine(results, groups, weights, None)
            expected = reference.combine(results.double().cpu(), expected_groups, weights.double().cpu(), None)
            stage.check_close(facts, {"out": out}, {"out": expected})
            assert torch.equal(out, kernels.combine(results, groups, weights, None)), "not deterministic"
            stack = kernels.stack(random_tensor(experts, size, 64, factor=size**-0.5))
            ends = torch.tensor([(top_experts.indices <= e).sum() for e in range(experts)], dtype=torch.int32)
            expert_outputs = stack(results, ends.to(stage.device))
            begin = [0, *ends.tolist()[:-1]]
            expected = torch.cat(
                [
                    results[a:b].double() @ stack.dense()[e].double()
                    for e, (a, b) in enumerate(zip(begin, ends.tolist(), strict=True))
                ]
            )
            stage.check_close(facts, {"taken": expert_outputs}, {"taken": expected})


def sampling_kernels(stage: Stage) -> None:
    sampler, vocab = TritonSampler(), stage.dry_or_gpu(300, 20000)
    for noisy in (False, True):
        with stage.check(f"choose, {'noise' if noisy else 'greedy'}") as facts:
            logits, draw = (
                random_logits(6, vocab, BF16, seed=stage.seed),
                random_inputs(unfiltered_sampling(2, BF16), 3, vocab, BF16),
            )
            draw = draw if noisy else replace(draw, noise=None)
            reference = TORCH.shard_best(SamplerInput(logits, [draw]), vocab)
            device_draws = [to_device(draw, stage.device)]
            scores, columns, total = sampler.shard_best(SamplerInput(logits.to(stage.device), device_draws), 5)
            by_column = torch.empty_like(reference[0]).scatter_(1, reference[1], reference[0])
            actual = {"scores": scores, "total": total, "of columns": by_column.gather(1, columns.cpu())}
            stage.check_close(
                facts, actual, {"scores": reference[0][:, :5], "total": reference[2], "of columns": reference[0][:, :5]}
            )
            best, _ = sampler.best(SamplerInput(logits.to(stage.device), device_draws))
            assert torch.equal(best.cpu(), columns[:, 0].cpu())
    with stage.check("thresholds of filters"):
        sampling = to_device(mixed_sampling(torch.float32), stage.device)
        count = sampling.seeds.shape[0]
        logits = random_logits(4 * count, vocab, BF16, seed=stage.seed).to(stage.device)
        scaled_logits = logits.float().view(count, 4, vocab) * sampling.inverse_temperature[:, None, None]
        thresholds = row_thresholds(logits, SamplingInputs(4, sampling, None))
        assert torch.equal(thresholds, filters.filter_thresholds(scaled_logits, sampling).view(-1, 1)), (
            "not bitwise equal"
        )
    with stage.check("keys of noise"):
        seeds, first = torch.tensor([0, 2**63 - 1, -1, 7]), torch.tensor([0, 1, 2**40, 9])
        hashes = torch.zeros(3, dtype=torch.int32, device=stage.device)
        noise = sampler.noise(seeds.to(stage.device), first.to(stage.device), 9, hashes, torch.float32)
        assert torch.equal(noise.keys.cpu(), keys_along(seeds, first, 9))


def trees(stage: Stage) -> None:
    random_source = torch.Generator().manual_seed(stage.seed)
    for k, steps, nodes in stage.dry_or_gpu(((3, 3, 7),), ((4, 3, 16), (8, 5, 32), (10, 8, 60))):
        with stage.check(f"trees, {k} x {steps}, {nodes} nodes"):
            check_trees(stage.device, random_source, k, steps, nodes)


def moves(stage: Stage, random_tensor: RandomTensors) -> None:
    with stage.check("compact windows"):
        pool = TritonPool(3, 64, Cell(2, 24, 24), BF16, stage.device)
        pool.kv.copy_(random_tensor(*pool.kv.shape))
        expected, targets = pool.kv.clone(), torch.tensor([[1, 2, 3], [20, 21, 22]], device=stage.device)
        sources = torch.tensor([[1, 5, 9], [23, 21, 30]], device=stage.device)
        pool.move_kv_cache(targets, sources)
        expected[:, targets.flatten()] = expected[:, sources.flatten()].clone()
        assert torch.equal(pool.kv, expected)


def timings(stage: Stage, random_tensor: RandomTensors) -> None:
    """Measure attention and row kernels with the sizes of Llama-3.1-8B. The L2 cache is flushed before each call."""
    kernels, timer = TritonKernels(), timer_of(stage.device)
    flush = torch.empty(stage.dry_or_gpu(1 << 10, 1 << 28), dtype=torch.uint8, device=stage.device)
    for name, call, bytes_moved in timed_works(stage, random_tensor, kernels):
        with stage.check(f"time, {name}") as facts:
            spans = []
            for _ in range(stage.dry_or_gpu(1, 3) + stage.dry_or_gpu(2, 15)):
                flush.zero_()
                start = timer.now()
                call()
                spans.append((start, timer.now()))
            stage.wait()
            seconds = sorted(timer.between(*span) for span in spans[stage.dry_or_gpu(1, 3) :])
            facts |= {"us": 1e6 * median(seconds), "us_least": 1e6 * seconds[0], "us_most": 1e6 * seconds[-1]}
            stage.write_line(figure={name: facts["us"], "unit": "us", "GB/s": bytes_moved / median(seconds) / 1e9})


def timed_works(stage: Stage, random_tensor: RandomTensors, kernels: TritonKernels) -> Iterator[tuple[str, Any, float]]:
    """Yield the kernel calls to measure: the name, the call, and the bytes that the call reads and writes."""
    heads, kv_heads, d = stage.dry_or_gpu((4, 2, 24), (32, 8, 128))
    loads = stage.dry_or_gpu(((2, 20, 1),), ((1, 8192, 1), (16, 8192, 1), (16, 2048, 4), (16, 2048, 32), (64, 2048, 4)))
    for requests, context, rows_per_request in loads:
        case_sizes = {"heads": heads, "kv_heads": kv_heads, "d": d, "page_size": 16, "lies": "scattered", "dtype": BF16}
        case = FilledCase(
            **case_sizes, committed=(context,) * requests, parents=(-1, *range(rows_per_request - 1)), chunks=()
        )
        attention, q, kv = bound_attention(case, stage), case.q.to(stage.device), case.kv.to(stage.device)
        bytes_moved = 2 * 2.0 * requests * (context + rows_per_request) * kv_heads * d
        yield (
            f"attention, {requests} x {rows_per_request} rows, {context}",
            lambda a=attention, q=q, kv=kv: a(1, q, kv, None),
            bytes_moved,
        )
    hidden, count = stage.dry_or_gpu((64, 3), (4096, 64))
    hidden_states, residual, scale, gate_up = (
        random_tensor(count, hidden),
        random_tensor(count, hidden),
        random_tensor(hidden),
        random_tensor(count, 7 * hidden),
    )
    yield (
        f"add and norm, {count} rows",
        lambda: kernels.add_norm(hidden_states, residual, scale, 1e-5),
        8.0 * hidden_states.numel(),
    )
    yield f"activate, {count} rows", lambda: kernels.activate(gate_up, Activation()), 3.0 * gate_up.numel()


class FilledCase(Case):
    """An attention case whose KV cells are all filled with random numbers, because a timed call reads all of them."""

    def filled_pool(self) -> Any:
        pool = super().filled_pool()
        pool.kv.normal_()
        return pool


def work(stage: Stage) -> None:
    filled_with_nan(stage)
    random_tensor = RandomTensors(stage)
    with torch.inference_mode():
        rows(stage, random_tensor)
        moves(stage, random_tensor)
        trees(stage)
        sampling_kernels(stage)
        products(stage, random_tensor)
        torch.use_deterministic_algorithms(False)
        timings(stage, random_tensor)


if __name__ == "__main__":
    raise SystemExit(run("kernels", work))
