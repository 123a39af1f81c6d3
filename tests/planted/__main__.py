"""`python -m tests.planted`: plant each fault in a copy of the checkout and run the tests that should find it.

Exit status 1: a fault was not found, or one is no fault.
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

KEPT = ROOT / ".planted"  # ignored by git: results, and objects of the C compiler


def planted(faults: list[Fault], trees: dict[str, str], planters: list[Planter]) -> Iterator[Result]:
    """Plant `faults`, as many at a time as there are planters; yield their results in order."""
    idle: SimpleQueue[Planter] = SimpleQueue()
    for planter in planters:
        idle.put(planter)

    def one(fault: Fault) -> Result:
        planter = idle.get()
        began = time.monotonic()
        try:
            outcome, by = planter.plant(fault)
        finally:
            idle.put(planter)
        return Result(fault.name, fault.digest, trees[fault.name], outcome, by, time.monotonic() - began)

    with ThreadPoolExecutor(len(planters)) as several:
        yield from several.map(one, faults)


def proved(found: list[Result], planter: Planter) -> Iterator[Result]:
    """Run the tests that found something without any fault; yield the results with what that says of them."""
    failing = planter.failing(sorted({result.by for result in found}))
    for result in found:
        if result.by in failing:
            yield replace(result, outcome="no fault", by=f"{result.by} fails without the fault too")
        else:
            yield replace(result, proved=True)


def arguments_of(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names or files of the faults to plant; none: all of them")
    parser.add_argument("--list", action="store_true", help="list the faults and what each would do to a user")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own (1)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a fault's tests may take (600)")
    parser.add_argument("--again", action="store_true", help="plant also faults whose result on this tree is known")
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    """Run the command; return its exit status."""
    asked = arguments_of(given)
    faults = [
        each
        for each in all_faults()
        if not asked.names or any(part in each.name or part in each.file for part in asked.names)
    ]
    if not faults:
        print(f"no fault is called {' or '.join(asked.names)}; --list lists them", file=sys.stderr)
        return 2
    if asked.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.file}: {fault.effect}\n    {' '.join(fault.tests)}")
        return 0
    names, results = files(), Results(KEPT / "results.jsonl")
    trees = {fault.name: tree_digest(names, fault.tests) for fault in faults}

    def known() -> list[Result]:
        return [found for each in faults if (found := results.of(each.digest, trees[each.name])) is not None]

    settled = () if asked.again else {result.digest for result in known() if result.outcome != "unknown"}
    left = [each for each in faults if each.digest not in settled]
    print(f"{len(faults)} faults; the results of {len(faults) - len(left)} are known", flush=True)
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        planters = []
        for job in range(max(1, min(asked.jobs, len(left)))):
            place = Path(folder) / str(job)
            planters.append(Planter(Copy(place / "checkout", names), place, KEPT / "objects", asked.limit))
        for result in planted(left, trees, planters):
            results.add(result)
            print(table([result]).splitlines()[1], flush=True)
        unproved = [result for result in known() if result.test is not None and not result.proved]
        if unproved:
            for result in proved(unproved, planters[0]):
                results.add(result)
    found = known()
    print(f"\n{table(found)}")
    return int(any(result.outcome != "found" for result in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
