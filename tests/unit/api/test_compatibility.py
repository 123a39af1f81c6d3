"""docs/compatibility.md says what the code does with every field that clients of other servers send."""

import pytest

from cluster.api.core.errors import ApiError
from cluster.api.core.fields import select_honoured_fields
from tests.compatibility import FILE, ROUTES, known, unknown, written

ODD = "a value that asks for something"


def test_every_client_field_is_honoured_harmless_or_refused() -> None:
    assert unknown() == []


def test_compatibility_page_matches_the_code() -> None:
    assert FILE.read_text(encoding="utf-8") == written(), "run python -m tests.compatibility"


@pytest.mark.parametrize("path", ROUTES)
def test_routes_treat_each_field_as_the_compatibility_page_says(path: str) -> None:
    route = ROUTES[path]
    for name in set().union(*known()[path].values()):
        kind = route.kind(name)
        if kind.startswith("refused"):
            with pytest.raises(ApiError) as caught:
                select_honoured_fields({name: ODD}, route.honoured, route.table)
            assert caught.value.param == name
        else:
            kept, warnings = select_honoured_fields({name: ODD}, route.honoured, route.table)
            assert not warnings and bool(kept) == kind.startswith("honoured")
