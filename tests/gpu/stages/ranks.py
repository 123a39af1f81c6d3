"""Two ranks on one GPU give the tokens, trees and accept lengths of one rank.

NCCL refuses two ranks of one host on the same device. So each rank has its own host name (`NCCL_HOSTID`), and the ranks
communicate over sockets. Therefore the stage tests the order of collectives, captures and tokens, but not speed. In a
dry run the ranks communicate over gloo.
"""

from typing import Any

from tests.distributed.compare import check
from tests.distributed.gang import Case, RankProcesses
from tests.distributed.test_parity import config
from tests.distributed.workload import workload
from tests.gpu.stages.stage import Stage, run
from tests.parity.harness import VOCAB, tiny_pair

CAPTURED = {"capture": "on", "capture_sizes": [1, 2, 4, 8, 32]}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # the data-parallel size, and settings
    "tensor parallel": (1, {}),
    "tensor parallel, captured": (1, CAPTURED),
    "data parallel, captured, padded": (2, CAPTURED | {"dp_padding": "padded", "debug_lockstep": True}),
    "data parallel, exact": (2, {"dp_padding": "exact", "vocab_parallel": "world"}),
}
TIMEOUT_S = 60.0


def work(stage: Stage) -> None:
    """Run each case on two ranks and on one rank, and compare the results."""
    module = stage.dry_or_gpu("tests.distributed.worker", "tests.gpu.shared_device")
    requests, horizon = stage.dry_or_gpu((8, 12), (24, 30))
    with RankProcesses(2, module) as ranks:
        for name, (dp, settings) in CASES.items():
            with stage.check(name) as facts:
                mesh = {"tp_size": 2, "attn_dp_size": dp, "device": stage.device.type}
                actions = workload(9 + dp, dp, requests, vocab=VOCAB, horizon=horizon)
                tally = check(ranks, Case(config(*tiny_pair(), **mesh, **settings), actions), timeout_s=TIMEOUT_S)
                facts |= {
                    "compared": tally.compared_requests,
                    "replayed": tally.replayed_steps,
                    "padded": tally.padding_rows,
                }
                assert not tally.mismatches, tally.mismatches[:3]
                assert tally.compared_requests == requests
                assert bool(tally.replayed_steps) == ("captured" in name), tally.replayed_steps


if __name__ == "__main__":
    raise SystemExit(run("ranks", work))
