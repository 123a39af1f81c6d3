"""A replica refuses new calls only while its drain lease is renewed."""

import pytest

from cluster.api.http import middleware
from cluster.api.http.middleware import DRAIN_LEASE_S, Drain


def test_drain_ends_when_its_lease_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(middleware.time, "monotonic", lambda: now)
    drain = Drain()
    assert not drain.refusing
    with drain.count_call():
        assert drain.begin() == 1 and drain.refusing
    now += DRAIN_LEASE_S - 1
    assert drain.refusing and drain.begin() == 0
    now += DRAIN_LEASE_S - 1
    assert drain.refusing
    now += 2
    assert not drain.refusing
