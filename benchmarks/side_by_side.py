"""Compare how fast two checkouts of this project decode on this machine.

    git worktree add /tmp/before HEAD~1
    python benchmarks/side_by_side.py /tmp/before . --out benchmarks/results/before.json

Each checkout has a process with an engine of the demo pair. Both decode the same requests and take turns of a few
steps, so that a machine that slows down affects both. With one thread they run on the same core, because the cores of a
shared machine differ. Memory layout makes a process a few percent faster or slower for its whole lifetime, so several
pairs of processes run each case. A process that has just run is faster than one that has to fill the core's caches
again, by up to half. So in a turn the first checkout runs, then the second twice, then the first again, and the ratio
of a turn is that of their total times. The median over all turns and the quartiles are shown. Above 1, the second
checkout is faster. Both must give the same tokens.
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
LONG_CONTEXTS = {"requests": 8, "prompt_tokens": 8064}
RUN_SECONDS = 0.03  # approximate decoding time of a run; each process runs twice in a turn
ORDER = (0, 1, 1, 0)  # of the two processes in a turn


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare how fast two checkouts decode.")
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="before, after")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of processes, one after the other")
    parser.add_argument("--turns", type=int, default=12, help="turns of each pair in each case")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument(
        "--long", action="store_true", help=f"{LONG_CONTEXTS['requests']} contexts of 8,192 tokens instead"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


class Contender:
    """The process of one checkout."""

    def __init__(self, checkout: Path, tree: str, threads: int, long: bool) -> None:
        script = checkout / "benchmarks" / "side_by_side.py"  # the checkout's own copy, which fits its code
        worker_settings = json.dumps({"tree": TREES[tree], "threads": threads, "long": long})
        self._process = subprocess.Popen(
            [sys.executable, str(script.resolve()), "--worker", worker_settings],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **command: Any) -> Any:
        """Send a command to the process and return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class CaseRatios:
    """Ratios of wall time and of CPU time in each turn of one case, and the number of steps of all turns."""

    def __init__(self) -> None:
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.steps = 0

    def row(self) -> dict[str, Any]:
        """Return the figures to show."""
        low, middle, high = statistics.quantiles(self.walls, n=4)
        return {"speed": middle, "quartiles": [low, high], "cpu": statistics.median(self.cpus), "steps": self.steps}


def run_turns(case: CaseRatios, pair: list[Contender], batch: int, temperature: float, turns: int) -> None:
    """Run `turns` turns of one case with one pair of processes, and add their ratios to `case`."""
    first_answers = [contender.ask(begin=batch, temperature=temperature) for contender in pair]
    steps = max(2, round(RUN_SECONDS / max(answer["seconds"] for answer in first_answers)))
    case.steps += steps * turns * (len(ORDER) // len(pair))
    for _ in range(turns):
        answers = [(index, pair[index].ask(steps=steps)) for index in ORDER]
        for clock, ratios in (("seconds", case.walls), ("cpu", case.cpus)):
            first, second = (sum(answer[clock] for index, answer in answers if index == number) for number in (0, 1))
            ratios.append(first / second)
    tokens = [contender.ask(end=True)["tokens"] for contender in pair]
    assert tokens[0] == tokens[1], "the checkouts gave different tokens"


def main() -> None:
    """Compare the checkouts, print the figures, and write them if `--out` is set."""
    args = parse_arguments()
    rows = []
    for tree in TREES:
        batches = (LONG_CONTEXTS["requests"],) if args.long else BATCHES
        cases = {key: CaseRatios() for key in product(TEMPERATURES[: 1 if args.long else 2], batches)}
        for _ in range(args.pairs):
            pair = [Contender(checkout, tree, args.threads, args.long) for checkout in args.checkouts]
            for (temperature, batch), case in cases.items():
                run_turns(case, pair, batch, temperature, args.turns)
            for contender in pair:
                contender.end()
        for (temperature, batch), case in cases.items():
            rows.append({"tree": tree, "batch": batch, "temperature": temperature} | case.row())
            print(json.dumps(rows[-1]), flush=True)
    total = statistics.geometric_mean([row["speed"] for row in rows])
    print(f"geometric mean {total:.3f}, least {min(row['speed'] for row in rows):.3f}, load {os.getloadavg()}")
    if args.out is not None:
        options = {"long": args.long, "pairs": args.pairs, "turns": args.turns}
        result = {"what": "side by side", **options, "mean": total, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run_worker(settings: dict[str, Any]) -> None:
    """Run the process of one checkout: obey the commands on stdin until it ends."""
    import torch

    from cluster.bench.pair import ModelPair, TreeChoice
    from cluster.bench.runs import fixed_length_params
    from cluster.engine import build_engine
    from cluster.request import Request

    torch.set_num_threads(settings["threads"])
    if settings["threads"] == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pair, max_requests = (
        ModelPair(num_threads=settings["threads"]),
        LONG_CONTEXTS["requests"] if settings["long"] else max(BATCHES),
    )
    config = pair.config(TreeChoice(*settings["tree"]), max_requests)
    length = LONG_CONTEXTS["prompt_tokens"] if settings["long"] else 64
    if settings["long"]:
        config = config.model_copy(update={"max_total_tokens": max_requests * 8704, "chunked_prefill_size": 1024})
    else:
        config = config.model_copy(update={"max_total_tokens": max_requests * 4096})
    engine, prompts = build_engine(config), pair.prompts(max_requests if not settings["long"] else 1, min(length, 64))
    tokens: dict[str, list[int]] = {}

    def run(steps: int) -> dict[str, float]:
        started_at, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(steps):
            for output in engine.step().outputs:
                tokens[output.request_id] += output.token_ids
        return {
            "seconds": (time.perf_counter() - started_at) / steps,
            "cpu": (time.process_time() - cpu_started) / steps,
        }

    for line in sys.stdin:
        command = json.loads(line)
        if "steps" in command:
            answer: Any = run(command["steps"])
        elif "begin" in command:
            tokens = {str(number): [] for number in range(command["begin"])}
            for number in range(command["begin"]):
                text = prompts[number % len(prompts)]
                prompt = (
                    tuple((text * (length // len(text) + 1))[number : number + length]) if settings["long"] else text
                )
                params = fixed_length_params(480 if settings["long"] else 4000, command["temperature"], number)
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
        run_worker(json.loads(sys.argv[2]))
    else:
        main()
