"""A replica refuses new calls for as long as somebody says that it is to drain, and no longer."""

import pytest

from cluster.api.http import middleware
from cluster.api.http.middleware import DRAIN_LEASE_S, Drain


def test_drain_ends_when_its_lease_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(middleware.time, "monotonic", lambda: now)
    one = Drain()
    assert not one.refusing
    with one.count_call():
        assert one.begin() == 1 and one.refusing
    now += DRAIN_LEASE_S - 1
    assert one.refusing and one.begin() == 0
    now += DRAIN_LEASE_S - 1
    assert one.refusing
    now += 2
    assert not one.refusing
