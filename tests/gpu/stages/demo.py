"""Runs the trained demo pair on the device.

In float64, its tokens must equal those of plain decoding with torch on a CPU. In bfloat16, the stage measures the
tokens per second and the tokens per step, with plain decoding and with speculation.
"""

import time

from cluster.bench.pair import PLAIN, ModelPair, TreeChoice
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.offline.stepping import complete, steps
from cluster.request import Request, RequestParams
from tests.gpu.stages.stage import Stage, run

TREES = (TreeChoice(3), TreeChoice(4, 4, 16))


def config(stage: Stage, tree: TreeChoice, requests: int, dtype: str, **settings: object) -> EngineConfig:
    """Return the config that `aerie bench` uses for the pair, with captured steps.

    A dry run uses the kernels in C, because Triton's interpreter is slow.
    """
    capture_settings = (
        {"capture": "on"} if stage.dry else {"capture": "auto", "capture_sizes": tuple(sorted({1, requests}))}
    )
    device_settings = {
        "device": stage.device.type,
        "attention_backend": stage.dry_or_gpu("c", "triton"),
        **capture_settings,
    }
    return ModelPair(dtype=dtype).config(tree, requests).model_copy(update=device_settings | settings)


def build_requests(count: int, length: int, max_new_tokens: int, temperature: float) -> list[Request]:
    """Return requests with held-out prompts of `length` tokens."""
    params = [
        RequestParams(temperature=temperature, seed=i, max_tokens=max_new_tokens, ignore_eos=True) for i in range(count)
    ]
    prompts = ModelPair().prompts(count, length)
    return [Request(str(i), tuple(ids), param) for i, (ids, param) in enumerate(zip(prompts, params, strict=True))]


def tokens(stage: Stage) -> None:
    reference_settings = {"device": "cpu", "attention_backend": "torch", "capture": "off"}
    for temperature in stage.dry_or_gpu((0.8,), (0.0, 0.8)):
        requests = build_requests(*stage.dry_or_gpu((1, 20, 4), (4, 64, 32)), temperature)
        with stage.check(f"temperature {temperature}, plain, by torch on a CPU"):
            plain = build_engine(config(stage, PLAIN, len(requests), "float64", **reference_settings))
            expected = complete(plain, requests)
        for tree in stage.dry_or_gpu(TREES[:1], TREES):
            with stage.check(f"temperature {temperature}, {tree}"):
                actual = complete(build_engine(config(stage, tree, len(requests), "float64")), requests)
                assert actual == expected, f"tokens {actual}, expected {expected}"


def speeds(stage: Stage) -> None:
    for count in stage.dry_or_gpu((2,), (1, 8, 32)):
        for tree in (PLAIN, *TREES):
            with stage.check(f"batch {count}, {tree}") as facts:
                engine = build_engine(config(stage, tree, count, stage.dry_or_gpu("float32", "bfloat16")))
                requests = build_requests(count, *stage.dry_or_gpu((12, 3), (64, 128)), 0.0)
                for _ in range(stage.dry_or_gpu(1, 2)):  # on a GPU the first round is a warm-up
                    start, token_count, output_count = time.perf_counter(), 0, 0
                    for outputs in steps(engine, requests):
                        token_count += sum(len(output.token_ids) for output in outputs)
                        output_count += len(outputs)
                facts |= {
                    "tokens_s": token_count / (time.perf_counter() - start),
                    "tokens_a_step": token_count / output_count,
                }
                stage.write_line(figure={"setting": f"demo, {tree}", "batch": count, **facts})


def work(stage: Stage) -> None:
    tokens(stage)
    speeds(stage)


if __name__ == "__main__":
    raise SystemExit(run("demo", work))
