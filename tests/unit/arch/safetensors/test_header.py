"""Headers of safetensors files are bounded and checked before anything is allocated; mutated ones never crash."""

import json
import random
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.arch.safetensors.header import DTYPE_BYTES, parse_header, read_header
from cluster.config import ConfigError
from cluster.models.checkpoint import DTYPES

HERE = Path("x.safetensors")
GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "empty": {"dtype": "I64", "shape": [0, 4], "data_offsets": [24, 24]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
    "c": {"dtype": "F8_E4M3", "shape": [2, 1, 3], "data_offsets": [34, 40]},
}


def parse(header: object, data: int = 40) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    parse_header(raw, 8 + len(raw) + data, HERE)


def changed(name: str, **entry: object) -> dict[str, object]:
    return {**GOOD, name: {**GOOD[name], **entry}}


def test_dtype_bytes_match_the_torch_item_sizes() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES


def test_parse_header_returns_dtype_shape_and_byte_range() -> None:
    raw = json.dumps(GOOD).encode()
    found = parse_header(raw, 8 + len(raw) + 40, HERE)
    base = 8 + len(raw)
    assert found["c"] == ("F8_E4M3", (2, 1, 3), base + 34, base + 40)
    assert list(found) == ["a", "empty", "b", "c"]


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, d in DTYPES.items() if d.itemsize > 1])
def test_read_header_reads_files_written_by_safetensors(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"x": torch.ones(3, 5).to(dtype), "scalar": torch.tensor(2).to(dtype), "none": torch.ones(0).to(dtype)}
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    found = read_header(tmp_path / "m.safetensors")
    assert {key: (s.dtype, s.shape) for key, s in found.items()} == {
        key: (name, tuple(t.shape)) for key, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"a": ' * 100_000, "not JSON"),
        ([], "not a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}", "not JSON"),
        ({"__metadata__": {"x": 1}}, "__metadata__"),
        ({"a": []}, "tensor 'a' must have dtype"),
        ({**GOOD, "a": {**GOOD["a"], "more": 1}}, "tensor 'a' must have dtype"),
        (changed("a", dtype="F31"), "tensor 'a' has dtype 'F31'; known: F64"),
        (changed("a", dtype=["F32"]), "tensor 'a' has dtype"),
        (changed("a", shape=[2, -3]), r"tensor 'a' has shape \[2, -3\]"),
        (changed("a", shape=[2, 3.0]), "tensor 'a' has shape"),
        (changed("a", shape=[True, 6]), "tensor 'a' has shape"),
        (changed("a", shape="23"), "tensor 'a' has shape"),
        (changed("a", shape=[2**61, 2**61]), "tensor 'a' lies at bytes 0 to 24"),
        (changed("a", shape=[3, 3]), r"bytes 0 to 24, but F32 of shape \[3, 3\] takes 36"),
        (changed("a", shape=[1] * 9), "9 dimensions"),
        (changed("a", data_offsets=[24, 0]), "tensor 'a' lies at"),
        (changed("a", data_offsets=[0]), "1 offsets"),
        (changed("a", data_offsets=[0, 2**63]), "tensor 'a' has data_offsets"),
        (changed("b", data_offsets=[20, 30]), "tensor 'b' begins at byte .*, but .* ends at"),
        (changed("b", data_offsets=[26, 36]), "tensor 'c' begins|tensor 'b' begins"),
        ({name: entry for name, entry in GOOD.items() if name != "b"}, "tensor 'c' begins"),
        ({name: entry for name, entry in GOOD.items() if name != "c"}, "tensor 'b' ends at byte .* of a file of"),
        (changed("c", shape=[2, 1, 4], data_offsets=[34, 42]), "tensor 'c' ends at byte .*; copy the file again"),
    ],
)
def test_invalid_header_is_refused_with_file_and_reason(header: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(header)
    assert "x.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**64 - 1])
def test_header_of_wrong_length_is_refused_without_large_allocation(length: int, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b"{}" * 50)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"m\.safetensors.*(claims|not JSON)"):
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """`raw` with a few bytes flipped, taken out, put in, doubled, or numbers and words replaced."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at, kind = chance.randrange(len(data) or 1), chance.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + chance.randint(1, 9)]
        elif kind == 2:
            data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 5)))
        elif kind == 3:
            data[at:at] = data[at : at + chance.randint(1, 60)]
        elif kind == 4:
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57] or [0]
            new = chance.choice([b"-1", b"0", b"4294967296", b"9223372036854775807", b"1e9", b"null", b"[]"])
            spot = chance.choice(digits)
            data[spot : spot + 1] = new
        else:
            words = [b"F32", b"BF16", b"F8_E4M3", b"shape", b"dtype", b"data_offsets", b"__metadata__"]
            data = bytearray(bytes(data).replace(chance.choice(words), chance.choice(words), 1))
    return bytes(data)


@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_mutated_headers_are_refused_or_valid(count: int) -> None:
    """0 crashes, 0 hangs, 0 over-allocations; what passes owns every byte of its file exactly once."""
    chance, raw, passed = random.Random(5), json.dumps(GOOD).encode(), 0
    tracemalloc.start()
    for _ in range(count):
        header = mutated(raw, chance)
        size = 8 + len(header) + chance.choice([40, 40, 40, 0, 39, 41, 2**40])
        try:
            found = parse_header(header, size, HERE)
        except ConfigError as error:
            assert "x.safetensors" in str(error)
            continue
        passed += 1
        at = 8 + len(header)
        for stored in sorted(found.values(), key=lambda s: (s.start, s.stop)):
            assert stored.start == at and stored.stop >= at
            at = stored.stop
        assert at == size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < passed < count / 2, "some mutations are harmless, most are not"
    assert peak < 5 * 2**20
