"""Tokenizer folders that cannot be loaded, each with a message that names the folder and the cause."""

import json
from pathlib import Path

import pytest

from cluster.api.core.tokenizer import ChatTokenizer
from cluster.config import ConfigError
from tests.serving.api.scripted import save_tokenizer

# name: (new content of files in a valid tokenizer folder, None to delete the file; a part of the error message)
TOKENIZERS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no tokenizer": ({"tokenizer.json": None}, "set tokenizer_path to a folder that holds tokenizer.json"),
    "cut off": ({"tokenizer.json": b'{"version": "1.0", "mod'}, "is not a tokenizer this version can read"),
    "a PNG file": ({"tokenizer.json": b"\x89PNG"}, "is not a tokenizer this version can read"),
    "tokenizer_config is a list": ({"tokenizer_config.json": b"[]"}, "is not a JSON object"),
    "tokenizer_config is not UTF-8": ({"tokenizer_config.json": b"\xff\xfe"}, "is not a JSON object"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_broken_tokenizer_folder_is_refused_with_its_path_and_the_cause(tmp_path: Path, name: str) -> None:
    files, message_part = TOKENIZERS[name]
    save_tokenizer(tmp_path)
    for file, content in files.items():
        if content is None:
            (tmp_path / file).unlink()
        else:
            (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError) as error_info:
        ChatTokenizer.load(str(tmp_path))
    assert message_part in str(error_info.value)
    assert str(tmp_path) in str(error_info.value)


def test_loading_a_tokenizer_runs_no_code_from_its_folder(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    marker_file = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker_file)!r}, 'w')\nclass Evil: pass\n")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(
        json.dumps({**config, "tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}})
    )
    try:
        ChatTokenizer.load(str(tmp_path))
    except ConfigError as error:
        assert str(tmp_path) in str(error)
    assert not marker_file.exists()
