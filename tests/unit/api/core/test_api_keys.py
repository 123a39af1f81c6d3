"""API keys: valid contents of a keys file and of the environment, the reload of a changed file, the time of a check,
and what repr, logs and cache salts show of a key.
"""

import hashlib
import hmac
import logging
import os
from pathlib import Path

import pytest

from cluster.api.core import api_keys
from cluster.api.core.api_keys import (
    ApiKey,
    ApiKeys,
    check_exposure,
    digest_of,
    is_loopback,
    keys_from_environment,
    parse_keys,
)
from cluster.api.http.middleware import cache_salt
from cluster.config import ConfigError


def key_line(name: str, token: str, scope: str = "use") -> str:
    """A line of a keys file as `aerie keys` writes it, built without the code of `aerie keys`."""
    return f"{name} {scope} sha256:{hashlib.sha256(token.encode()).hexdigest()}\n"


class FakeClock:
    """A clock whose time the test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(
        "# who\n\n" + key_line("ann", "token-of-ann") + key_line("bob", "token-of-bob", "admin") + "  # end"
    )
    return path


def key_names(keys: ApiKeys, *tokens: str) -> list[str | None]:
    return [key.name if (key := keys.find(token.encode())) else None for token in tokens]


def test_keys_file_gives_names_and_scopes(file: Path) -> None:
    keys = ApiKeys(file)
    assert key_names(keys, "token-of-ann", "token-of-bob", "token-of-an", "", "ann") == ["ann", "bob", None, None, None]
    bob = keys.find(b"token-of-bob")
    assert bob is not None and bob.scope == "admin"
    assert parse_keys(bob.to_line(), "x") == (bob,), "parse_keys reads the line of to_line"


MALFORMED_LINES = {
    "no hash": "ann use\n",
    "another hash": "ann use md5:" + "0" * 64,
    "a hash that is too short": "ann use sha256:" + "0" * 63,
    "capital letters": "ann use sha256:" + "A" * 64,
    "another scope": "ann root sha256:" + "0" * 64,
    "a name with a slash": "a/b use sha256:" + "0" * 64,
    "a fourth word": "ann use sha256:" + "0" * 64 + " more",
    "the key itself": "sk-aerie-secret\n",
    "a name twice": key_line("ann", "1") + key_line("ann", "2"),
    "a key twice": key_line("ann", "1") + key_line("bob", "1"),
}


@pytest.mark.parametrize("bad_line", MALFORMED_LINES.values(), ids=MALFORMED_LINES)
def test_malformed_keys_file_is_refused_at_start_and_not_quoted(file: Path, bad_line: str) -> None:
    file.write_text(key_line("first", "0") + bad_line)
    with pytest.raises(ConfigError) as captured_error:
        ApiKeys.load(str(file), {})
    message = str(captured_error.value)
    assert "api_keys_file" in message and str(file) in message
    assert "secret" not in message and "0" * 20 not in message
    assert ("line 2" in message and "sha256:HEX" in message) or "twice" in message


def test_unusable_keys_files_are_refused(tmp_path: Path, file: Path) -> None:
    for path, reason in (
        (tmp_path / "nothing", "No such file"),
        (tmp_path, "must be a file"),
        (Path("/dev/zero"), "must be a file"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ApiKeys.load(str(path), {})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        ApiKeys.load(str(file), {})
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match=f"holds no key; make one: aerie keys create {file} NAME"):
        ApiKeys.load(str(file), {})
    file.write_text(key_line("ann", "1"))
    file.chmod(0o646)
    with pytest.raises(ConfigError, match="chmod o-w"):
        ApiKeys.load(str(file), {})


def test_environment_variables_give_keys_of_both_scopes(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ApiKeys.load(None, {}) is None
    environment = {"AERIE_API_KEY": "first-key-of-many, second-key-of-many", "AERIE_ADMIN_API_KEY": "short"}
    environment_keys = keys_from_environment(environment)
    assert [(key.name, key.scope) for key in environment_keys] == [
        ("AERIE_API_KEY", "use"),
        ("AERIE_API_KEY.2", "use"),
        ("AERIE_ADMIN_API_KEY", "admin"),
    ]
    assert "AERIE_ADMIN_API_KEY has fewer than 16" in caplog.text and caplog.text.count("fewer") == 1
    combined_keys = ApiKeys.load(str(file), environment)
    assert combined_keys is not None
    assert key_names(combined_keys, "second-key-of-many", "short") == ["AERIE_API_KEY.2", "AERIE_ADMIN_API_KEY"]
    assert key_names(combined_keys, "first-key-of-many, second-key-of-many", "token-of-ann") == [None, "ann"]
    for bad_value in ("", " ", "one,", "of two words", "größe", "tab\tkey"):
        with pytest.raises(ConfigError, match="AERIE_API_KEY must hold keys") as captured_error:
            ApiKeys.load(None, {"AERIE_API_KEY": bad_value})
        assert "words" not in str(captured_error.value)
    with pytest.raises(ConfigError, match="twice"):
        ApiKeys.load(str(file), {"AERIE_API_KEY": "token-of-ann"})


def test_changed_keys_file_is_reloaded_without_a_restart(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster.api.core.api_keys")
    clock = FakeClock()
    keys = ApiKeys(file, clock=clock)
    file.write_text(key_line("bob", "token-of-bob") + key_line("cid", "token-of-cid"))
    all_tokens = ("token-of-ann", "token-of-bob", "token-of-cid")
    clock.now += 0.9
    assert key_names(keys, *all_tokens) == ["ann", "bob", None], "the file is checked once a second"
    clock.now += 0.2
    assert key_names(keys, *all_tokens) == [None, "bob", "cid"]
    replacement = file.with_name("new")
    replacement.write_text(key_line("ann", "token-of-ann"))
    replacement.replace(file)
    clock.now += 1.1
    assert key_names(keys, *all_tokens) == ["ann", None, None]
    file.write_text("")
    for _ in range(3):
        clock.now += 1.1
        assert key_names(keys, *all_tokens) == [None, None, None], "no token is valid without keys"
    assert len(caplog.records) == 3, "a file that has not changed is not read again"


def test_changed_keys_file_of_same_size_and_mtime_is_reloaded(file: Path) -> None:
    clock = FakeClock()
    keys = ApiKeys(file, clock=clock)
    file_stat = file.stat()
    file.write_text(file.read_text().replace(key_line("ann", "token-of-ann"), key_line("ann", "token-of-eve")))
    os.utime(file, ns=(file_stat.st_atime_ns, file_stat.st_mtime_ns))
    assert file.stat().st_size == file_stat.st_size
    clock.now += 1.1
    assert key_names(keys, "token-of-ann", "token-of-eve") == [None, "ann"]


@pytest.mark.parametrize("fault", ["malformed", "missing", "unreadable", "world-writable"])
def test_unreadable_new_keys_file_leaves_the_keys_unchanged(
    file: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    keys = ApiKeys(file, clock=clock)
    valid_text = file.read_text()
    if fault == "malformed":
        file.write_text("ann use sha256:123")
    elif fault == "missing":
        file.unlink()
    elif fault == "unreadable":
        file.write_text(valid_text + " ")
        denied = PermissionError(13, "Permission denied", str(file))
        monkeypatch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(denied))
    else:
        file.chmod(0o666)
    for _ in range(5):
        clock.now += 1.1
        assert key_names(keys, "token-of-ann", "token-of-bob") == ["ann", "bob"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "the API keys stay as they were" in record.getMessage()
    monkeypatch.undo()
    file.unlink(missing_ok=True)
    file.write_text(key_line("ann", "token-of-eve"))
    clock.now += 1.1
    assert key_names(keys, "token-of-ann", "token-of-eve") == [None, "ann"], "the next valid file is loaded"


@pytest.mark.parametrize("token", ["key-0", "key-7", "key-19", "none of them", ""])
def test_find_compares_a_token_with_every_key(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(key_line(f"name{at}", f"key-{at}") for at in range(20)))
    keys, compared = ApiKeys(file), []
    original_compare = hmac.compare_digest

    def recording_compare(first: bytes, second: bytes) -> bool:
        compared.append(first)
        assert len(first) == len(second) == 32
        return original_compare(first, second)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", recording_compare)
    keys.find(token.encode())
    assert len(set(compared)) == 20


def test_repr_shows_neither_key_nor_hash() -> None:
    key = ApiKey("ann", "use", digest_of(b"secret"))
    keys = ApiKeys(None, [key])
    for text in (repr(key), str(key), str(keys), f"{[key]}"):
        assert key.digest.hex() not in text and repr(key.digest) not in text
    assert str(keys) == "ann (use)"


def test_cache_salts_differ_by_api_key_and_client_salt() -> None:
    ann, bob = (ApiKey(name, "use", digest_of(name.encode())) for name in ("ann", "bob"))
    assert cache_salt(None, None) == 0, "requests without key and salt share one salt"
    salts = [cache_salt(key, client_salt) for key in (None, ann, bob) for client_salt in (None, "a", "b", "\ud800")]
    assert len(set(salts)) == 12 and max(salts) < 1 << 128
    assert salts == [
        cache_salt(key, client_salt) for key in (None, ann, bob) for client_salt in (None, "a", "b", "\ud800")
    ]
    assert cache_salt(ApiKey("renamed", "admin", ann.digest), "a") == cache_salt(ann, "a")
    assert f"{ann.digest.hex()}" not in f"{salts[4]:x}"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False),
        ("10.0.0.7", False), ("example.org", False), ("localhost.example.org", False), ("", False), (None, False),
    ],
)  # fmt: skip
def test_check_exposure_beyond_loopback_needs_keys_or_explicit_setting(host: str | None, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    check_exposure(host, ApiKeys(None, [ApiKey("ann", "use", b"")]), allow_unauthenticated=False)
    check_exposure(host, None, allow_unauthenticated=True)
    if loopback:
        check_exposure(host, None, allow_unauthenticated=False)
        return
    with pytest.raises(ConfigError) as captured_error:
        check_exposure(host, None, allow_unauthenticated=False)
    for expected_text in ("api_keys_file", "AERIE_API_KEY", "allow_unauthenticated", "aerie keys create"):
        assert expected_text in str(captured_error.value)
