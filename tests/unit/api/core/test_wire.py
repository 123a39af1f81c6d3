"""`parse_body` accepts what `json` accepts, and answers everything else with status 400, in linear time."""

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.api.core.errors import ApiError
from cluster.api.core.wire import MAX_DEPTH, parse_body

NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    value=st.dictionaries(st.text(), VALUES, max_size=5), ascii_only=st.booleans(), indent=st.sampled_from([None, 2])
)
def test_parse_body_returns_valid_json_objects(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    assert parse_body(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()) == value


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.binary(max_size=60) | st.text(st.sampled_from('{}[]":,\\0e-.tn'), max_size=60).map(str.encode))
def test_parse_body_answers_invalid_json_with_400(body: bytes) -> None:
    try:
        assert isinstance(parse_body(body), dict)
    except ApiError as error:
        assert (error.status, error.code) == (400, "invalid_json")


def test_nesting_depth_is_counted_outside_strings() -> None:
    deep = '{"a":' * MAX_DEPTH + '"' + "[{" * 500 + '\\""' + "}" * MAX_DEPTH
    assert parse_body(deep.encode())
    with pytest.raises(ApiError, match="nested deeper"):
        parse_body(('{"a":' + deep + "}").encode())


@pytest.mark.parametrize("unit", ['"', '\\"', '"\\', "[]", '""', "\\", '"a', "{}"])
def test_parse_body_refuses_an_invalid_megabyte_quickly(unit: str) -> None:
    body = (unit * ((1 << 20) // len(unit))).encode()
    started = time.process_time()
    with pytest.raises(ApiError):
        parse_body(body)
    assert time.process_time() - started < 2.0
