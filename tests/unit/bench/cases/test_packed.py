"""The part of `aerie bench` that measures packed weights."""

from cluster.bench.cases import packed
from cluster.bench.cases.packed import DTYPES, FORMATS, Size


def test_every_format_is_beside_its_dequantised_twin() -> None:
    result = packed.measure(Size(256, 64, (1, 3), 2), say=lambda text: None)
    assert len(result["figures"]) == len(DTYPES) * len(FORMATS) * 2
    assert all(figure["ms"] > 0 < figure["dequantised_ms"] for figure in result["figures"])
    assert all(figure["bytes"] < figure["dequantised_bytes"] for figure in result["figures"] if figure["kept"])
    assert "int4 by groups of 32" in packed.show(result)
