"""`python -m tests.planted`: plant each fault in a copy of the checkout and run the tests that should find it.

The exit status is 1 if a fault was not found, or if a listed fault is no fault.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from tests.planted.checkout import ROOT, Copy, files, tree_digest
from tests.planted.fault import Fault, all_faults
from tests.planted.planting import Planter
from tests.planted.results import Result, Results, table

RESULTS_FOLDER = ROOT / ".planted"  # ignored by git: results, and objects of the C compiler


def planted(faults: list[Fault], trees: dict[str, str], planters: list[Planter]) -> Iterator[Result]:
    """Plant `faults`, as many at a time as there are planters; yield their results in order.

    `trees` has the tree digest of each fault, by the name of the fault.
    """
    idle_planters: SimpleQueue[Planter] = SimpleQueue()
    for planter in planters:
        idle_planters.put(planter)

    def plant_one(fault: Fault) -> Result:
        planter = idle_planters.get()
        started_at = time.monotonic()
        try:
            outcome, test_or_reason = planter.plant(fault)
        finally:
            idle_planters.put(planter)
        return Result(
            fault.name, fault.digest, trees[fault.name], outcome, test_or_reason, time.monotonic() - started_at
        )

    with ThreadPoolExecutor(len(planters)) as pool:
        yield from pool.map(plant_one, faults)


def proved(results_to_prove: list[Result], planter: Planter) -> Iterator[Result]:
    """Run the tests that found faults again, without any fault; yield the updated results.

    A result is proved if its test passes now. If the test fails, the result becomes "no fault".
    """
    failing_tests = planter.failing(sorted({result.by for result in results_to_prove}))
    for result in results_to_prove:
        if result.by in failing_tests:
            yield replace(result, outcome="no fault", by=f"{result.by} fails without the fault too")
        else:
            yield replace(result, proved=True)


def arguments_of(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names or files of the faults to plant; none: all of them")
    parser.add_argument("--list", action="store_true", help="list the faults and what each would do to a user")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own (1)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a fault's tests may take (600)")
    parser.add_argument("--again", action="store_true", help="plant also faults whose result on this tree is known")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    arguments = arguments_of(argv)
    faults = [
        candidate
        for candidate in all_faults()
        if not arguments.names or any(part in candidate.name or part in candidate.file for part in arguments.names)
    ]
    if not faults:
        print(f"no fault is called {' or '.join(arguments.names)}; --list lists them", file=sys.stderr)
        return 2
    if arguments.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.file}: {fault.effect}\n    {' '.join(fault.tests)}")
        return 0
    names, results = files(), Results(RESULTS_FOLDER / "results.jsonl")
    trees = {fault.name: tree_digest(names, fault.tests) for fault in faults}

    def stored_results() -> list[Result]:
        return [
            stored
            for candidate in faults
            if (stored := results.of(candidate.digest, trees[candidate.name])) is not None
        ]

    settled_digests = (
        () if arguments.again else {result.digest for result in stored_results() if result.outcome != "unknown"}
    )
    remaining_faults = [candidate for candidate in faults if candidate.digest not in settled_digests]
    print(f"{len(faults)} faults; the results of {len(faults) - len(remaining_faults)} are known", flush=True)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        planters = []
        for job in range(max(1, min(arguments.jobs, len(remaining_faults)))):
            job_folder = Path(folder) / str(job)
            planters.append(
                Planter(Copy(job_folder / "checkout", names), job_folder, RESULTS_FOLDER / "objects", arguments.limit)
            )
        for result in planted(remaining_faults, trees, planters):
            results.add(result)
            print(table([result]).splitlines()[1], flush=True)
        unproved = [result for result in stored_results() if result.test is not None and not result.proved]
        if unproved:
            for result in proved(unproved, planters[0]):
                results.add(result)
    stored = stored_results()
    print(f"\n{table(stored)}")
    return int(any(result.outcome != "found" for result in stored))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
