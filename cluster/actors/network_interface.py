"""The network interface for traffic between ranks: the one that has the node's address in Ray."""

import os

import ray

import psutil  # type: ignore[import-untyped]  # isort: skip  # Ray's own copy, found after `import ray`

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def node_address() -> str:
    """Return this node's IP address in Ray; 127.0.0.1 if Ray listens on loopback only."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this IP address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return None


def choose_interface(address: str) -> str | None:
    """Make gloo and NCCL in this process use the interface of `address`, and return its name (None if there is none).
    Environment variables that the user has set are kept.

    By default gloo uses the address that the host's name resolves to, and NCCL uses the first interface that is not
    loopback. On a host with several networks, other hosts may not reach those defaults.
    """
    name = interface_of(address)
    if name is not None:
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, name)
    return name
