"""Compares the tokens of an engine in float64: captured steps, eager steps, and torch on a CPU give the same tokens.

The stage checks chains and trees, with greedy decoding and with sampling.
"""

import tempfile
from pathlib import Path

from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.offline.stepping import complete
from cluster.request import Request, RequestParams
from tests.gpu.stages.stage import Stage, run
from tests.support.tiny_checkpoints import tiny_draft, tiny_target


def work(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as name:
        target = tiny_target(Path(name) / "target", vocab_size=24, layers=stage.dry_or_gpu(3, 4))
        draft = tiny_draft(Path(name) / "draft", target)
        new, count = stage.dry_or_gpu((5, 1), (32, 4))
        for topk, temperature in stage.dry_or_gpu(((2, 0.8),), ((1, 0.0), (1, 0.8), (4, 0.0), (4, 0.8))):
            settings = {
                "model_path": target,
                "dtype": "float64",
                "max_running_requests": 4,
                "max_total_tokens": 2048,
                "mixed_prefill_size": 64,
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": draft,
                "speculative_num_steps": stage.dry_or_gpu(2, 3),
                "speculative_eagle_topk": topk,
                "speculative_num_draft_tokens": {1: stage.dry_or_gpu(3, 4), 2: 5, 4: 12}[topk],
            }
            compare(stage, settings, f"topk {topk}, temperature {temperature}", requests(temperature, new, count))


def compare(stage: Stage, settings: dict[str, object], label: str, request_list: list[Request]) -> None:
    """Compare an engine on the device, with eager and with captured steps, with torch on the CPU."""
    device_settings = settings | {"device": stage.device.type, "attention_backend": "triton"}
    with stage.check(f"{label}, by torch on a CPU"):
        config = EngineConfig.from_kwargs(settings | {"device": "cpu", "attention_backend": "torch", "capture": "off"})
        expected = complete(build_engine(config), request_list)
        assert all(len(tokens) == request_list[0].params.max_tokens for tokens in expected)
    for capture in ("off", "on"):
        with stage.check(f"{label}, {'captured' if capture == 'on' else 'eager'}") as facts:
            sizes = {"capture_sizes": (1, 2, 4)} if capture == "on" and not stage.dry else {}
            engine = build_engine(EngineConfig.from_kwargs(device_settings | {"capture": capture} | sizes))
            facts["kernels"] = engine.info().kernels
            actual = [complete(engine, request_list) for _ in range(stage.dry_or_gpu(1, 2))]
            assert all(tokens == expected for tokens in actual), f"tokens {actual}, expected {expected}"
            if capture == "on":
                facts["programs"] = len(engine._parts.lockstep.programs.captured)
                assert facts["programs"], "nothing was captured"


def requests(temperature: float, max_new_tokens: int, count: int) -> list[Request]:
    prompts = [tuple(2 + (i + n) % 20 for n in range(3 + 9 * i)) for i in range(count)]
    params = [
        RequestParams(temperature=temperature, seed=i, max_tokens=max_new_tokens, ignore_eos=True) for i in range(count)
    ]
    return [Request(str(i), prompt, param) for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))]


if __name__ == "__main__":
    raise SystemExit(run("tokens", work))
