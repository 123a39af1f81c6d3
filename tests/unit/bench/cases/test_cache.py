import pytest

from cluster.bench.cases import cache


def test_every_load_is_measured_over_both_caches(capsys: pytest.CaptureFixture[str]) -> None:
    result = cache.measure(cache.QUICK)
    assert [one["dtype"] for one in result["figures"]] == ["float32"] * 5 + ["bfloat16"] * 5
    assert all(one["fp8_us"] > 0 and one["us"] > 0 and one["fp8_bytes"] == 272 for one in result["figures"])
    assert {one["bytes"] for one in result["figures"]} == {1024, 512}
    assert "272 of 1024" in cache.show(result) and "prompt" in cache.show(result)
