"""The demo pair, trained weights and all: in float64 the tokens of plain decoding by torch on a CPU; in bfloat16 how
many tokens a second it gives, plain and speculating, and how many of a draft's are accepted.
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
    """As `aerie bench` has engines of the pair, captured; dry by the kernels in C, as Triton is interpreted there."""
    captured = {"capture": "on"} if stage.dry else {"capture": "auto", "capture_sizes": tuple(sorted({1, requests}))}
    there = {"device": stage.device.type, "attention_backend": stage.either("c", "triton"), **captured}
    return ModelPair(dtype=dtype).config(tree, requests).model_copy(update=there | settings)


def asked(count: int, length: int, new: int, temperature: float) -> list[Request]:
    """Held-out prompts of so many tokens."""
    params = [RequestParams(temperature=temperature, seed=i, max_tokens=new, ignore_eos=True) for i in range(count)]
    prompts = ModelPair().prompts(count, length)
    return [Request(str(i), tuple(ids), one) for i, (ids, one) in enumerate(zip(prompts, params, strict=True))]


def tokens(stage: Stage) -> None:
    by_torch = {"device": "cpu", "attention_backend": "torch", "capture": "off"}
    for temperature in stage.either((0.8,), (0.0, 0.8)):
        requests = asked(*stage.either((1, 20, 4), (4, 64, 32)), temperature)
        with stage.check(f"temperature {temperature}, plain, by torch on a CPU"):
            plain = build_engine(config(stage, PLAIN, len(requests), "float64", **by_torch))
            expected = complete(plain, requests)
        for tree in stage.either(TREES[:1], TREES):
            with stage.check(f"temperature {temperature}, {tree}"):
                given = complete(build_engine(config(stage, tree, len(requests), "float64")), requests)
                assert given == expected, f"{given} are not {expected}"


def speeds(stage: Stage) -> None:
    for count in stage.either((2,), (1, 8, 32)):
        for tree in (PLAIN, *TREES):
            with stage.check(f"batch {count}, {tree}") as facts:
                engine = build_engine(config(stage, tree, count, stage.either("float32", "bfloat16")))
                requests = asked(count, *stage.either((12, 3), (64, 128)), 0.0)
                for _ in range(stage.either(1, 2)):  # what is made once is made in the first
                    began, given, total = time.perf_counter(), 0, 0
                    for outputs in steps(engine, requests):
                        given += sum(len(output.token_ids) for output in outputs)
                        total += len(outputs)
                facts |= {"tokens_s": given / (time.perf_counter() - began), "tokens_a_step": given / total}
                stage.say(figure={"setting": f"demo, {tree}", "batch": count, **facts})


def work(stage: Stage) -> None:
    tokens(stage)
    speeds(stage)


if __name__ == "__main__":
    raise SystemExit(run("demo", work))
