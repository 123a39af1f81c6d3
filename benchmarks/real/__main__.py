"""`python -m benchmarks.real --root DIR`: build the real model, compare Aerie with `transformers`, print the table.

Each stage runs in a process of its own and writes `ROOT/results/STAGE.json`. A stage is skipped if that file was made
from the same model, prompts, options and source files (`STAGE_SOURCES`).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.real import answers, ngram, pieces, prompts, speed
from benchmarks.real.answers import log_progress
from benchmarks.real.build import build
from benchmarks.real.comparison import LogitGap, compare_answers
from benchmarks.real.kept import ResultCache
from benchmarks.real.table import report
from cluster.bench.report import machine_info
from cluster.paths.checkout import CHECKOUT

NEW_TOKENS, REPEATS = 32, 3
EXIT_FAILED = 1
SOURCES = ("*.py", "*.c", "*.h")

Stage = Callable[[str, list[prompts.Prompt], argparse.Namespace, ResultCache], dict[str, Any]]
STAGES: dict[str, Stage] = {
    "transformers": lambda folder, texts, args, cached: answers.by_transformers(folder, texts, args.new_tokens, cached),
    "engine": lambda folder, texts, args, cached: answers.by_engine(folder, texts, args.new_tokens, cached),
    "server": lambda folder, texts, args, _: answers.by_server(folder, texts, args.new_tokens),
    "pieces": lambda folder, texts, *_: pieces.check_pieces(folder, texts),
    "speed": lambda folder, _, args, cached: (
        speed.measure_speed(folder, args.repeats, cached) | {"machine": machine_info()}
    ),
    "ngram": lambda folder, texts, args, cached: ngram.measure_ngram(folder, texts, args.repeats, cached),
}
PACKAGE_FOLDER = CHECKOUT / "cluster"
STAGE_SOURCES = {  # the code of this project that a stage runs: if it has changed, the stage runs again
    "transformers": (answers,),
    "engine": (answers, PACKAGE_FOLDER),
    "server": (answers, PACKAGE_FOLDER),
    "pieces": (pieces, PACKAGE_FOLDER),
    "speed": (speed, answers, PACKAGE_FOLDER),
    "ngram": (ngram, answers, PACKAGE_FOLDER),
}
# Stages whose speed is not measured get one thread: on a busy machine, two threads mostly wait for each other.
SINGLE_THREADED = ("transformers", "engine", "server", "pieces")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description="Compare with a real model.")
    parser.add_argument("--root", type=Path, required=True, help="folder for the model and the results")
    parser.add_argument("--model", type=Path, help="folder of another model, in place of the one that is built")
    parser.add_argument("--torch-args", default="", help="passed to pip when it installs torch")
    parser.add_argument("--prompts", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="most tokens of an answer")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each contender of stage speed")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, metavar="STAGE")
    parser.add_argument("--again", action="store_true", help="also run stages that have results")
    parser.add_argument("--alone", metavar="STAGE", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    """Run the stages that have no valid result, and print the table. Return 1 if a check of `report` fails, else 0."""
    folder = str(args.model or build(args.root, args.torch_args.split(), log_progress))
    selected_prompts = prompts.read_prompts()[: args.prompts]
    results_folder = args.root / "results"
    results_folder.mkdir(parents=True, exist_ok=True)
    if args.alone:
        inputs = json.dumps(_stage_inputs(args.alone, folder, args))
        cache_file = results_folder / f"{args.alone}.{hashlib.sha256(inputs.encode()).hexdigest()[:12]}.parts"
        print(json.dumps(STAGES[args.alone](folder, selected_prompts, args, ResultCache(cache_file))))
        return 0
    stage_results = {name: _result(name, folder, args, results_folder / f"{name}.json") for name in args.stages}
    if {"transformers", "engine", "server"} <= set(stage_results):
        names = [prompt.name for prompt in selected_prompts]
        gap_between = logit_gap(folder)
        stage_results["compared"] = compare_answers(
            names, stage_results["transformers"], stage_results["engine"], stage_results["server"], gap_between
        )
        (results_folder / "compared.json").write_text(json.dumps(stage_results["compared"], indent=1), encoding="utf-8")
    text, passed = report(stage_results)
    print(text)
    (results_folder / "table.txt").write_text(text + "\n", encoding="utf-8")
    return 0 if passed else EXIT_FAILED


def _result(name: str, folder: str, args: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Return a stage's result: from its file if that is still valid, otherwise from a new run."""
    inputs = _stage_inputs(name, folder, args)
    if file.is_file() and not args.again:
        stored: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        if stored["made_of"] == inputs:
            log_progress(f"{name}: kept")
            return stored["result"]
    log_progress(f"{name}: running")
    command = [sys.executable, "-m", "benchmarks.real", "--root", args.root, "--model", folder, "--alone", name]
    command += [f"--new-tokens={args.new_tokens}", f"--repeats={args.repeats}"]
    command += [f"--prompts={args.prompts}"] if args.prompts else []
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if name in SINGLE_THREADED else {})
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=environment)
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps({"made_of": inputs, "result": result}), encoding="utf-8")
    partial_file.rename(file)
    return result


def _stage_inputs(name: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return a description of what a stage's result depends on: the names and sizes of the model's files, the options,
    and digests of the prompts and of the source that the stage runs.
    """
    weights = [f"{file.name} {file.stat().st_size}" for file in sorted(Path(folder).iterdir())]
    texts = hashlib.sha256(prompts.FILE.read_bytes()).hexdigest()
    paths = [
        source_path if isinstance(source_path, Path) else Path(str(source_path.__file__))
        for source_path in STAGE_SOURCES[name]
    ]
    source = [_digest(path) for path in paths]
    numbers = [args.prompts, args.repeats if name in ("speed", "ngram") else args.new_tokens]
    return {"model": weights, "prompts": texts, "asked": numbers, "source": source}


@cache
def _digest(path: Path) -> str:
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in path.rglob(pattern)):
        digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return digest.hexdigest()


def logit_gap(folder: str) -> LogitGap:
    """Return a function that computes the difference of two tokens' logits in float64. It loads the model at its first
    call.
    """

    @cache
    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True)

    @torch.inference_mode()
    def gap(context: Sequence[int], reference: int | None, ours: int | None) -> float:
        logits = model()(input_ids=torch.tensor([list(context)]), use_cache=False).logits[0, -1]
        end_token = max(answers.end_token_ids(model()), key=lambda token: float(logits[token]), default=None)
        first, second = (end_token if token is None else token for token in (reference, ours))
        return float(logits[first] - logits[second]) if first is not None and second is not None else float("inf")

    return gap


if __name__ == "__main__":
    sys.exit(main(parse_arguments()))
