"""What the device is, and its ceilings: bytes copied and read a second, and products of two matrices."""

import os
from functools import partial

import torch

from cluster.bench.ceilings import PROBE_SIZES, best_seconds, measure_ceilings
from cluster.bench.report import machine_info
from tests.gpu.stages.stage import Stage, run


def work(stage: Stage) -> None:
    told = {"machine": machine_info(), "torch": torch.__version__, "cuda": torch.version.cuda, "seed": stage.seed}
    with stage.check("device") as facts:
        facts |= told | {"arch": os.uname().machine}
        if not stage.dry:
            has = torch.cuda.get_device_properties(stage.device)
            free, total = torch.cuda.mem_get_info()
            facts |= {"name": has.name, "capability": f"{has.major}.{has.minor}", "sms": has.multi_processor_count}
            facts |= {"l2_mb": has.L2_cache_size / 1e6, "free_gb": free / 1e9, "total_gb": total / 1e9}
    with stage.check("copy") as facts:
        size = stage.either(1 << 24, PROBE_SIZES["cuda"].read_bytes)
        one = torch.empty(size, dtype=torch.uint8, device=stage.device).random_()
        other = torch.empty_like(one)
        seconds = [best_seconds(partial(other.copy_, one), stage.device, repeats=5) for _ in range(2)]
        assert torch.equal(one[:4096], other[:4096]) and torch.equal(one[-4096:], other[-4096:])
        facts["terabytes_s"] = [2 * size / each / 1e12 for each in seconds]
        stage.say(figure={"copy, TB/s read and written": max(facts["terabytes_s"])})
        del one, other
    dtype = torch.bfloat16
    side = stage.either(256, PROBE_SIZES["cuda"].matrix_side)
    with stage.check("product in bfloat16") as facts:
        matrices = [torch.randn(side, side, device=stage.device).to(dtype) for _ in range(2)]
        given = torch.mm(*matrices)[:8]
        stage.near(facts, {"product": given}, {"product": matrices[0][:8].double() @ matrices[1].double()})
        seconds = [best_seconds(partial(torch.mm, *matrices), stage.device, repeats=10) for _ in range(2)]
        facts["tflops"] = [2 * side**3 / each / 1e12 for each in seconds]
        stage.say(figure={"product in bfloat16, TFLOP/s": max(facts["tflops"])})
    if not stage.dry:  # dry it would take the seconds that a CPU's own ceilings take
        with stage.check("read"):
            best = measure_ceilings(device=stage.device, dtype=dtype)
            stage.say(
                figure={
                    "read, TB/s": best.bytes_per_s / 1e12,
                    "product as `aerie bench` has it": best.flops_per_s / 1e12,
                }
            )


if __name__ == "__main__":
    raise SystemExit(run("ceilings", work))
