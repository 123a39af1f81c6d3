"""Checks within seconds that a Ray cluster answers. `ray.init` would wait one to two minutes if no cluster answers."""

import socket
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from cluster.config import ConfigError

ANSWER_TIMEOUT_S = 4.0
CLIENT_SCHEME = "ray://"  # an address of Ray's client server
# If the answer has one of these statuses, the cluster is alive and requires a token.
ALIVE_STATUSES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def check_alive(address: str) -> None:
    """Check that a cluster answers at `address`, an address for `ray.init`.

    Raises:
        ConfigError: no cluster answered within `ANSWER_TIMEOUT_S` seconds; the message says why.
    """
    if reason := _client_error(address) if address.startswith(CLIENT_SCHEME) else _gcs_error(address):
        raise ConfigError(f"no Ray cluster answers at {address!r} (--address or RAY_ADDRESS): {reason}")


def _client_error(address: str) -> str:
    """Return why Ray's client server does not accept a connection, or an empty string if it does."""
    host, _, port = address.removeprefix(CLIENT_SCHEME).partition("?")[0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _gcs_error(address: str) -> str:
    """Return why the cluster's control service (GCS) does not answer. Return an empty string if it answers, or if its
    address is not known.
    """
    try:
        gcs_address = canonicalize_bootstrap_address(address)
    except Exception as error:
        return str(error)
    if gcs_address is None:  # "auto", and no cluster was started on this machine: Ray says so at once
        return ""
    with init_grpc_channel(gcs_address) as channel:
        stub: Any = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=ANSWER_TIMEOUT_S)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            return "" if error.code() in ALIVE_STATUSES else f"{error.code().name}: {error.details()}"
    return ""
