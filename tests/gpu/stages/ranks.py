"""Two ranks on one GPU, over NCCL: tokens, trees and accept lengths are those of one rank.

NCCL refuses two ranks of a host on the same device; with a host name of its own (`NCCL_HOSTID`) each rank passes, and
they meet over sockets. So this proves order, capture and tokens, never speed. Dry, the ranks meet over gloo.
"""

from typing import Any

from tests.gpu.stages.stage import Stage, run
from tests.parity.harness import VOCAB, tiny_pair
from tests.ranks.compare import check
from tests.ranks.gang import Case, Ranks
from tests.ranks.test_parity import config
from tests.ranks.workload import workload

CAPTURED = {"capture": "on", "capture_sizes": [1, 2, 4, 8, 32]}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # data-parallel ranks of the two, and settings
    "tensor parallel": (1, {}),
    "tensor parallel, captured": (1, CAPTURED),
    "data parallel, captured, padded": (2, CAPTURED | {"dp_padding": "padded", "debug_lockstep": True}),
    "data parallel, exact": (2, {"dp_padding": "exact", "vocab_parallel": "world"}),
}
TIMEOUT_S = 60.0


def work(stage: Stage) -> None:
    """Run each case on two ranks and on one."""
    module = stage.either("tests.ranks.worker", "tests.gpu.shared_device")
    requests, horizon = stage.either((8, 12), (24, 30))
    with Ranks(2, module) as ranks:
        for name, (dp, settings) in CASES.items():
            with stage.check(name) as facts:
                mesh = {"tp_size": 2, "attn_dp_size": dp, "device": stage.device.type}
                actions = workload(9 + dp, dp, requests, vocab=VOCAB, horizon=horizon)
                tally = check(ranks, Case(config(*tiny_pair(), **mesh, **settings), actions), timeout_s=TIMEOUT_S)
                facts |= {"compared": tally.compared, "replayed": tally.replayed, "padded": tally.padded}
                assert not tally.mismatches, tally.mismatches[:3]
                assert tally.compared == requests
                assert bool(tally.replayed) == ("captured" in name), tally.replayed


if __name__ == "__main__":
    raise SystemExit(run("ranks", work))
