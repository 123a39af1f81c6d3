"""Records the properties of the device, and measures its limits.

The limits are the bytes copied per second, the bytes read per second, and the speed of a product of two matrices.
"""

import os
from functools import partial

import torch

from cluster.bench.ceilings import PROBE_SIZES, best_seconds, measure_ceilings
from cluster.bench.report import machine_info
from tests.gpu.stages.stage import Stage, run


def work(stage: Stage) -> None:
    environment = {
        "machine": machine_info(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seed": stage.seed,
    }
    with stage.check("device") as facts:
        facts |= environment | {"arch": os.uname().machine}
        if not stage.dry:
            properties = torch.cuda.get_device_properties(stage.device)
            free, total = torch.cuda.mem_get_info()
            facts |= {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "sms": properties.multi_processor_count,
            }
            facts |= {"l2_mb": properties.L2_cache_size / 1e6, "free_gb": free / 1e9, "total_gb": total / 1e9}
    with stage.check("copy") as facts:
        size = stage.dry_or_gpu(1 << 24, PROBE_SIZES["cuda"].read_bytes)
        source = torch.empty(size, dtype=torch.uint8, device=stage.device).random_()
        copy = torch.empty_like(source)
        seconds = [best_seconds(partial(copy.copy_, source), stage.device, repeats=5) for _ in range(2)]
        assert torch.equal(source[:4096], copy[:4096]) and torch.equal(source[-4096:], copy[-4096:])
        facts["terabytes_s"] = [2 * size / elapsed / 1e12 for elapsed in seconds]
        stage.write_line(figure={"copy, TB/s read and written": max(facts["terabytes_s"])})
        del source, copy
    dtype = torch.bfloat16
    side = stage.dry_or_gpu(256, PROBE_SIZES["cuda"].matrix_side)
    with stage.check("product in bfloat16") as facts:
        matrices = [torch.randn(side, side, device=stage.device).to(dtype) for _ in range(2)]
        product = torch.mm(*matrices)[:8]
        stage.check_close(facts, {"product": product}, {"product": matrices[0][:8].double() @ matrices[1].double()})
        seconds = [best_seconds(partial(torch.mm, *matrices), stage.device, repeats=10) for _ in range(2)]
        facts["tflops"] = [2 * side**3 / elapsed / 1e12 for elapsed in seconds]
        stage.write_line(figure={"product in bfloat16, TFLOP/s": max(facts["tflops"])})
    if not stage.dry:  # in a dry run this would take as many seconds as the measurement of a real CPU
        with stage.check("read"):
            ceilings = measure_ceilings(device=stage.device, dtype=dtype)
            stage.write_line(
                figure={
                    "read, TB/s": ceilings.bytes_per_s / 1e12,
                    "product as `aerie bench` has it": ceilings.flops_per_s / 1e12,
                }
            )


if __name__ == "__main__":
    raise SystemExit(run("ceilings", work))
