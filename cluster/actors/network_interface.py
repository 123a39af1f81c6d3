"""Which network interface the ranks of a gang talk over: the one that carries the node's address in Ray."""

import os

import ray

import psutil  # type: ignore[import-untyped]  # isort: skip  # Ray's own copy: importable once Ray is

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def node_address() -> str:
    """This node's IP address, as Ray knows it: 127.0.0.1 on a Ray that is reached by loopback only."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def interface_of(address: str) -> str | None:
    """The name of the interface that carries an IP address of this machine; None when none does."""
    for name, carried in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in carried):
            return str(name)
    return None


def choose_interface(address: str) -> str | None:
    """Make gloo and NCCL of this process use the interface of `address`, and return it; what the user set is kept.

    By default gloo uses the address that the host's name resolves to and NCCL the first interface that is not loopback:
    on a host with several networks these need not be the one that the other hosts can reach.
    """
    name = interface_of(address)
    if name is not None:
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)
    return name
