"""Two checkouts of this project, step by step: how fast one decodes compared with the other, on this machine.

    git worktree add /tmp/before HEAD~1
    python benchmarks/side_by_side.py /tmp/before . --out benchmarks/results/before.json

Each checkout has a process with an engine of the demo pair. Both decode the same requests, a few steps at a time in
turns, so that a machine which slows down slows both; every other turn they change places. With one thread they share
a core, because those of a shared machine differ. Where memory happens to lie makes a process a few percent faster or
slower as long as it lives, so each case is run by several pairs of processes. A ratio is taken within a turn; shown are
the median over all turns and the quartiles. Above 1 the second checkout is faster. Both must give the same tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

TREES = {"plain": (0, 1, 0), "chain of 3": (3, 1, 0), "tree of 12": (3, 4, 12)}
BATCHES, TEMPERATURES = (1, 8, 32), (0.0, 1.0)
LONG = {"requests": 8, "prompt_tokens": 8064}
SECONDS = 0.03  # of decoding in a turn, about


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="How fast two checkouts decode, in turns.")
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="before, after")
    parser.add_argument("--pairs", type=int, default=8, help="of processes, one after the other")
    parser.add_argument("--turns", type=int, default=25, help="of each pair in each case")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--long", action="store_true", help=f"{LONG['requests']} contexts of 8,192 tokens instead")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


class Contender:
    """The process of one checkout."""

    def __init__(self, checkout: Path, tree: str, threads: int, long: bool) -> None:
        given = json.dumps({"tree": TREES[tree], "threads": threads, "long": long})
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", given],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> Any:
        """Have it do something and wait for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Case:
    """Ratios of wall time and of CPU time of one case, each of one turn, and how many steps these took."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.steps = 0

    def row(self) -> dict[str, Any]:
        """What is shown of it."""
        low, middle, high = statistics.quantiles(self.walls, n=4)
        return {"speed": middle, "quartiles": [low, high], "cpu": statistics.median(self.cpus), "steps": self.steps}


def compare(case: Case, pair: list[Contender], batch: int, temperature: float, turns: int) -> None:
    """Some turns of one case."""
    once = [one.ask(begin=batch, temperature=temperature) for one in pair]
    steps = max(2, round(SECONDS / max(each["seconds"] for each in once)))
    case.steps += steps * turns
    for turn in range(turns):
        took = {at: pair[at].ask(steps=steps) for at in ((0, 1) if turn % 2 else (1, 0))}
        case.walls.append(took[0]["seconds"] / took[1]["seconds"])
        case.cpus.append(took[0]["cpu"] / took[1]["cpu"])
    tokens = [one.ask(end=True)["tokens"] for one in pair]
    assert tokens[0] == tokens[1], "other tokens"


def main() -> None:
    """Compare, print, and write what was asked for."""
    args = arguments()
    rows = []
    for tree in TREES:
        batches = (LONG["requests"],) if args.long else BATCHES
        cases = {key: Case() for key in product(TEMPERATURES[: 1 if args.long else 2], batches)}
        for _ in range(args.pairs):
            pair = [Contender(checkout, tree, args.threads, args.long) for checkout in args.checkouts]
            for (temperature, batch), case in cases.items():
                compare(case, pair, batch, temperature, args.turns)
            for one in pair:
                one.end()
        for (temperature, batch), case in cases.items():
            rows.append({"tree": tree, "batch": batch, "temperature": temperature} | case.row())
            print(json.dumps(rows[-1]), flush=True)
    total = statistics.geometric_mean([row["speed"] for row in rows])
    print(f"geometric mean {total:.3f}, least {min(row['speed'] for row in rows):.3f}, load {os.getloadavg()}")
    if args.out is not None:
        asked = {"long": args.long, "pairs": args.pairs, "turns": args.turns}
        result = {"what": "side by side", **asked, "mean": total, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def work(given: dict[str, Any]) -> None:
    """A contender: decode as asked, until the input ends."""
    import torch

    from cluster.bench.pair import Pair, TreeChoice
    from cluster.bench.runs import params_of
    from cluster.engine import build_engine
    from cluster.request import Request

    torch.set_num_threads(given["threads"])
    if given["threads"] == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pair, most = Pair(num_threads=given["threads"]), LONG["requests"] if given["long"] else max(BATCHES)
    config = pair.config(TreeChoice(*given["tree"]), most)
    length = LONG["prompt_tokens"] if given["long"] else 64
    if given["long"]:
        config = config.model_copy(update={"max_total_tokens": most * 8704, "chunked_prefill_size": 1024})
    else:
        config = config.model_copy(update={"max_total_tokens": most * 4096})
    engine, prompts = build_engine(config), pair.prompts(most if not given["long"] else 1, min(length, 64))
    tokens: dict[str, list[int]] = {}

    def run(steps: int) -> dict[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            for output in engine.step().outputs:
                tokens[output.request_id] += output.token_ids
        return {"seconds": (time.perf_counter() - began) / steps, "cpu": (time.process_time() - cpu) / steps}

    for line in sys.stdin:
        asked = json.loads(line)
        if "steps" in asked:
            answer: Any = run(asked["steps"])
        elif "begin" in asked:
            tokens = {str(number): [] for number in range(asked["begin"])}
            for number in range(asked["begin"]):
                text = prompts[number % len(prompts)]
                prompt = tuple((text * (length // len(text) + 1))[number : number + length]) if given["long"] else text
                params = params_of(480 if given["long"] else 4000, asked["temperature"], number)
                engine.submit(Request(str(number), tuple(prompt), params))
            while engine.status().queued_tokens:
                run(1)
            answer = run(5)
        else:
            for name in tokens:
                engine.abort(name)
            answer = {"tokens": tokens}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
