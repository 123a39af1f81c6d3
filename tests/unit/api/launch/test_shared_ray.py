"""An address where no Ray cluster answers is refused at once and by name, whatever listens there."""

import socket
from collections.abc import Callable

import pytest

import cluster.api.launch.shared_ray as shared_ray
from cluster.api.launch.shared_ray import check_alive
from cluster.config import ConfigError


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "address",
    [
        closed_address,
        lambda: f"ray://{closed_address()}",
        lambda: "ray://127.0.0.1:port",
        lambda: "no-such-host.invalid:6379",
        lambda: "not an address",
    ],
)
def test_unreachable_ray_address_is_refused_by_name(address: Callable[[], str]) -> None:
    ray_address = address()
    with pytest.raises(
        ConfigError, match=r"no Ray cluster answers at .* \(--address or RAY_ADDRESS\): "
    ) as captured_error:
        check_alive(ray_address)
    assert ray_address in str(captured_error.value)


def test_check_alive_does_not_wait_for_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ray, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("", 0)) as silent_server:
        with pytest.raises(ConfigError, match=r"DEADLINE_EXCEEDED|UNAVAILABLE"):
            check_alive(f"127.0.0.1:{silent_server.getsockname()[1]}")
        check_alive(f"ray://127.0.0.1:{silent_server.getsockname()[1]}")


def test_unresolved_auto_address_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ray, "canonicalize_bootstrap_address", lambda _: None)
    check_alive("auto")
