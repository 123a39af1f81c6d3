"""`python -m benchmarks PART ..`: `aerie bench` with the parts that only developers of this repository run."""

import sys

from benchmarks import kernel_times, overlap
from cluster import cli
from cluster.bench.command import PARTS, Part

# The host's work per step, and how long the device waits for it.
PARTS["overlap"] = Part(overlap, 5, 60)
# Each kernel against its reference and the machine's ceilings.
PARTS["kernels"] = Part(kernel_times, 5, 30, standalone=True)

if __name__ == "__main__":
    sys.exit(cli.main(["bench", *sys.argv[1:]]))
