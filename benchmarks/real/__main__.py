"""`python -m benchmarks.real --root DIR`: build the real model, compare Aerie with `transformers`, print the table.

Each stage is a process of its own and leaves `ROOT/results/STAGE.json`. A stage is skipped where that file was made of
the same model, prompts and, for stages that run this project's code, the same source.
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

from benchmarks.real import answers, pieces, prompts, speed
from benchmarks.real.answers import say
from benchmarks.real.build import build
from benchmarks.real.comparison import Gap, compared
from benchmarks.real.kept import Kept
from benchmarks.real.table import report
from cluster.bench.report import machine
from cluster.paths.checkout import CHECKOUT

NEW_TOKENS, REPEATS = 32, 3
MISSED = 1
SOURCES = ("*.py", "*.c", "*.h")

Stage = Callable[[str, list[prompts.Prompt], argparse.Namespace, Kept], dict[str, Any]]
STAGES: dict[str, Stage] = {
    "transformers": lambda folder, asked, args, kept: answers.by_transformers(folder, asked, args.new_tokens, kept),
    "engine": lambda folder, asked, args, kept: answers.by_engine(folder, asked, args.new_tokens, kept),
    "server": lambda folder, asked, args, _: answers.by_server(folder, asked, args.new_tokens),
    "pieces": lambda folder, asked, *_: pieces.checked(folder, asked),
    "speed": lambda folder, _, args, kept: speed.measured(folder, args.repeats, kept) | {"machine": machine()},
}
OWN = CHECKOUT / "cluster"
SOURCE = {  # what the stages run of this project: a stage is run again where that has changed
    "transformers": (answers,),
    "engine": (answers, OWN),
    "server": (answers, OWN),
    "pieces": (pieces, OWN),
    "speed": (speed, answers, OWN),
}
# Stages of which only the tokens count have one thread: on a busy machine, two mostly wait for each other.
UNTIMED = ("transformers", "engine", "server", "pieces")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description="Compare with a real model.")
    parser.add_argument("--root", type=Path, required=True, help="folder for the model and the results")
    parser.add_argument("--model", type=Path, help="folder of another model, in place of the one that is built")
    parser.add_argument("--torch-args", default="", help="passed to pip when it installs torch")
    parser.add_argument("--prompts", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each answer at most")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each contender of stage speed")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES, metavar="STAGE")
    parser.add_argument("--again", action="store_true", help="run the stages also where they have results")
    parser.add_argument("--alone", metavar="STAGE", choices=STAGES, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(args: argparse.Namespace) -> int:
    """Run what is missing and print the table; 1 where an answer differs, else 0."""
    folder = str(args.model or build(args.root, args.torch_args.split(), say))
    asked = prompts.read()[: args.prompts]
    results = args.root / "results"
    results.mkdir(parents=True, exist_ok=True)
    if args.alone:
        made_of = json.dumps(_made_of(args.alone, folder, args))
        parts = results / f"{args.alone}.{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.parts"
        print(json.dumps(STAGES[args.alone](folder, asked, args, Kept(parts))))
        return 0
    found = {name: _result(name, folder, args, results / f"{name}.json") for name in args.stages}
    if {"transformers", "engine", "server"} <= set(found):
        names = [prompt.name for prompt in asked]
        gap = gap_of(folder)
        found["compared"] = compared(names, found["transformers"], found["engine"], found["server"], gap)
        (results / "compared.json").write_text(json.dumps(found["compared"], indent=1), encoding="utf-8")
    text, good = report(found)
    print(text)
    (results / "table.txt").write_text(text + "\n", encoding="utf-8")
    return 0 if good else MISSED


def _result(name: str, folder: str, args: argparse.Namespace, file: Path) -> dict[str, Any]:
    """What a stage gave, from its file where that is still true, else from a new run of it."""
    made_of = _made_of(name, folder, args)
    if file.is_file() and not args.again:
        kept: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        if kept["made_of"] == made_of:
            say(f"{name}: kept")
            return kept["result"]
    say(f"{name}: running")
    command = [sys.executable, "-m", "benchmarks.real", "--root", args.root, "--model", folder, "--alone", name]
    command += [f"--new-tokens={args.new_tokens}", f"--repeats={args.repeats}"]
    command += [f"--prompts={args.prompts}"] if args.prompts else []
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if name in UNTIMED else {})
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    half = file.with_suffix(".partial")
    half.write_text(json.dumps({"made_of": made_of, "result": result}), encoding="utf-8")
    half.rename(file)
    return result


def _made_of(name: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a stage's result depends on: the weights, the prompts, the numbers asked for, and the source it runs."""
    weights = [f"{file.name} {file.stat().st_size}" for file in sorted(Path(folder).iterdir())]
    texts = hashlib.sha256(prompts.FILE.read_bytes()).hexdigest()
    paths = [one if isinstance(one, Path) else Path(str(one.__file__)) for one in SOURCE[name]]
    source = [_digest(path) for path in paths]
    asked = [args.prompts, args.repeats if name == "speed" else args.new_tokens]
    return {"model": weights, "prompts": texts, "asked": asked, "source": source}


@cache
def _digest(path: Path) -> str:
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in path.rglob(pattern)):
        digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return digest.hexdigest()


def gap_of(folder: str) -> Gap:
    """How far apart two tokens are in float64; the model is loaded when the first difference asks for it."""

    @cache
    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True)

    @torch.inference_mode()
    def gap(context: Sequence[int], right: int | None, own: int | None) -> float:
        logits = model()(input_ids=torch.tensor([list(context)]), use_cache=False).logits[0, -1]
        end = max(answers.ends_of(model()), key=lambda token: float(logits[token]), default=None)
        first, second = (end if token is None else token for token in (right, own))
        return float(logits[first] - logits[second]) if first is not None and second is not None else float("inf")

    return gap


if __name__ == "__main__":
    sys.exit(main(arguments()))
