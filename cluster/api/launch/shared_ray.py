"""Checks that a running Ray cluster answers. Ray itself tries a dead address for one to two minutes."""

import socket
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from cluster.config import ConfigError

ANSWER_S = 4.0
CLIENT = "ray://"  # an address of Ray's client server
ALIVE = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)  # the cluster answers but wants a token


def check_alive(address: str) -> None:
    """Check that a cluster answers at `address`, an address for `ray.init`.

    Raises:
        ConfigError: it did not answer within `ANSWER_S`; the message says why.
    """
    if why := _client(address) if address.startswith(CLIENT) else _gcs(address):
        raise ConfigError(f"no Ray cluster answers at {address!r} (--address or RAY_ADDRESS): {why}")


def _client(address: str) -> str:
    """Return why Ray's client server does not accept a connection; empty if it does."""
    host, _, port = address.removeprefix(CLIENT).partition("?")[0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _gcs(address: str) -> str:
    """Return why the cluster's control service (GCS) does not answer; empty if it does, or if only Ray can tell."""
    try:
        found = canonicalize_bootstrap_address(address)
    except Exception as error:
        return str(error)
    if found is None:  # "auto", and no cluster was started on this machine: Ray says so at once
        return ""
    with init_grpc_channel(found) as channel:
        stub: Any = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=ANSWER_S)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            return "" if error.code() in ALIVE else f"{error.code().name}: {error.details()}"
    return ""
