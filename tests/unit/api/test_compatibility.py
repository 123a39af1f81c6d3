"""docs/compatibility.md says what the code does with each field that clients of other servers send."""

import pytest

from cluster.api.core.errors import ApiError
from cluster.api.core.fields import select_honoured_fields
from tests.reference_pages.compatibility import FILE, ROUTES, documented_fields, page_text, unhandled_fields

NON_NEUTRAL_VALUE = "a value that asks for something"


def test_every_client_field_is_honoured_harmless_or_refused() -> None:
    assert unhandled_fields() == []


def test_compatibility_page_matches_the_code() -> None:
    assert FILE.read_text(encoding="utf-8") == page_text(), "run python -m tests.reference_pages.compatibility"


@pytest.mark.parametrize("path", ROUTES)
def test_routes_treat_each_field_as_the_compatibility_page_says(path: str) -> None:
    route = ROUTES[path]
    for name in set().union(*documented_fields()[path].values()):
        kind = route.treatment(name)
        if kind.startswith("refused"):
            with pytest.raises(ApiError) as captured_error:
                select_honoured_fields({name: NON_NEUTRAL_VALUE}, route.honoured, route.table)
            assert captured_error.value.param == name
        else:
            honoured_fields, warnings = select_honoured_fields({name: NON_NEUTRAL_VALUE}, route.honoured, route.table)
            assert not warnings and bool(honoured_fields) == kind.startswith("honoured")
