"""The parser bounds and checks headers of safetensors files before it allocates; mutated headers never crash it."""

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

FILE_PATH = Path("x.safetensors")
VALID_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "empty": {"dtype": "I64", "shape": [0, 4], "data_offsets": [24, 24]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
    "c": {"dtype": "F8_E4M3", "shape": [2, 1, 3], "data_offsets": [34, 40]},
}


def parse(header: object, data: int = 40) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    parse_header(raw, 8 + len(raw) + data, FILE_PATH)


def header_with(name: str, **entry: object) -> dict[str, object]:
    return {**VALID_HEADER, name: {**VALID_HEADER[name], **entry}}


def test_dtype_bytes_match_the_torch_item_sizes() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES


def test_parse_header_returns_dtype_shape_and_byte_range() -> None:
    raw = json.dumps(VALID_HEADER).encode()
    found = parse_header(raw, 8 + len(raw) + 40, FILE_PATH)
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
        ({**VALID_HEADER, "a": {**VALID_HEADER["a"], "more": 1}}, "tensor 'a' must have dtype"),
        (header_with("a", dtype="F31"), "tensor 'a' has dtype 'F31'; known: F64"),
        (header_with("a", dtype=["F32"]), "tensor 'a' has dtype"),
        (header_with("a", shape=[2, -3]), r"tensor 'a' has shape \[2, -3\]"),
        (header_with("a", shape=[2, 3.0]), "tensor 'a' has shape"),
        (header_with("a", shape=[True, 6]), "tensor 'a' has shape"),
        (header_with("a", shape="23"), "tensor 'a' has shape"),
        (header_with("a", shape=[2**61, 2**61]), "tensor 'a' lies at bytes 0 to 24"),
        (header_with("a", shape=[3, 3]), r"bytes 0 to 24, but F32 of shape \[3, 3\] takes 36"),
        (header_with("a", shape=[1] * 9), "9 dimensions"),
        (header_with("a", data_offsets=[24, 0]), "tensor 'a' lies at"),
        (header_with("a", data_offsets=[0]), "1 offsets"),
        (header_with("a", data_offsets=[0, 2**63]), "tensor 'a' has data_offsets"),
        (header_with("b", data_offsets=[20, 30]), "tensor 'b' begins at byte .*, but .* ends at"),
        (header_with("b", data_offsets=[26, 36]), "tensor 'b' begins"),
        ({name: entry for name, entry in VALID_HEADER.items() if name != "b"}, "tensor 'c' begins"),
        (
            {name: entry for name, entry in VALID_HEADER.items() if name != "c"},
            "tensor 'b' ends at byte .* of a file of",
        ),
        (header_with("c", shape=[2, 1, 4], data_offsets=[34, 42]), "tensor 'c' ends at byte .*; copy the file again"),
    ],
)
def test_invalid_header_is_refused_with_file_and_reason(header: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as captured_error:
        parse(header)
    assert "x.safetensors" in str(captured_error.value)
    assert len(str(captured_error.value)) < 600


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


def mutate(raw: bytes, generator: random.Random) -> bytes:
    """`raw` after 1 to 4 random changes: flipped bits, bytes removed, added or repeated, numbers or words replaced."""
    data = bytearray(raw)
    for _ in range(generator.randint(1, 4)):
        at, kind = generator.randrange(len(data) or 1), generator.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del data[at : at + generator.randint(1, 9)]
        elif kind == 2:
            data[at:at] = bytes(generator.randrange(256) for _ in range(generator.randint(1, 5)))
        elif kind == 3:
            data[at:at] = data[at : at + generator.randint(1, 60)]
        elif kind == 4:
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57] or [0]
            replacement = generator.choice([b"-1", b"0", b"4294967296", b"9223372036854775807", b"1e9", b"null", b"[]"])
            position = generator.choice(digits)
            data[position : position + 1] = replacement
        else:
            words = [b"F32", b"BF16", b"F8_E4M3", b"shape", b"dtype", b"data_offsets", b"__metadata__"]
            data = bytearray(bytes(data).replace(generator.choice(words), generator.choice(words), 1))
    return bytes(data)


@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_mutated_headers_are_refused_or_valid(count: int) -> None:
    """No header causes a crash, a hang or a large allocation. The tensors of a valid header cover every byte of the
    file exactly once.
    """
    generator, raw, accepted_count = random.Random(5), json.dumps(VALID_HEADER).encode(), 0
    tracemalloc.start()
    for _ in range(count):
        header = mutate(raw, generator)
        size = 8 + len(header) + generator.choice([40, 40, 40, 0, 39, 41, 2**40])
        try:
            found = parse_header(header, size, FILE_PATH)
        except ConfigError as error:
            assert "x.safetensors" in str(error)
            continue
        accepted_count += 1
        at = 8 + len(header)
        for stored in sorted(found.values(), key=lambda s: (s.start, s.stop)):
            assert stored.start == at and stored.stop >= at
            at = stored.stop
        assert at == size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < accepted_count < count / 2, "some mutations are harmless, most are not"
    assert peak < 5 * 2**20
