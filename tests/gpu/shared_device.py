"""The worker process of one of several ranks that share one GPU.

NCCL refuses two ranks of one host on the same device. So each rank gives NCCL its own host name, and the ranks
communicate over sockets. Such runs test the order of collectives, captures and tokens, but not speed.
"""

import os
import sys

from tests.distributed.process import serve
from tests.distributed.worker import run_and_report

if __name__ == "__main__":
    os.environ |= {"NCCL_HOSTID": f"host-{sys.argv[1]}", "NCCL_SOCKET_IFNAME": "lo"}
    serve(int(sys.argv[1]), run_and_report)
