"""The worker of one of several ranks that share one GPU: NCCL refuses two ranks of a host on the same device, so each
rank names a host of its own, and they meet over sockets. Such runs prove order, capture and tokens, never speed.
"""

import os
import sys

from tests.ranks.process import serve
from tests.ranks.worker import live

if __name__ == "__main__":
    os.environ |= {"NCCL_HOSTID": f"host-{sys.argv[1]}", "NCCL_SOCKET_IFNAME": "lo"}
    serve(int(sys.argv[1]), live)
