"""Before a replica starts, it checks its settings and whether everyone who can reach the server may use it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.api.launch.keys import create
from cluster.api.serve import application
from cluster.api.serve.settings import AppSettings, parse
from cluster.config import ConfigError


def settings(**more: Any) -> AppSettings:
    return parse({"llm_configs": [{"model_loading_config": {"model_id": "m"}}], **more})


@pytest.fixture
def set_proxy_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the host on which Serve's proxies listen."""
    monkeypatch.delenv("AERIE_API_KEY", raising=False)
    monkeypatch.delenv("AERIE_ADMIN_API_KEY", raising=False)

    def set_host(host: str | None) -> None:
        client = SimpleNamespace(http_config=SimpleNamespace(host=host))
        monkeypatch.setattr(application, "_get_global_client", lambda: client)

    return set_host


def test_replica_beyond_loopback_needs_keys_or_allow_unauthenticated(
    set_proxy_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_proxy_host("0.0.0.0")
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' is reachable from other machines and there are no API keys"):
        application._rest_options(settings())
    assert application._rest_options(settings(allow_unauthenticated=True))["keys"] is None
    key = create(tmp_path / "keys", "ann", "use")
    keys = application._rest_options(settings(api_keys_file=str(tmp_path / "keys")))["keys"]
    assert keys.find(key.encode()).name == "ann"
    monkeypatch.setenv("AERIE_API_KEY", "sk-a-key-of-the-environment")
    keys = application._rest_options(settings(allow_unauthenticated=True))["keys"]
    assert keys.find(b"sk-a-key-of-the-environment").scope == "use", "allow_unauthenticated keeps keys"


def test_replica_on_loopback_needs_keys_only_with_api_keys_file(set_proxy_host: Any) -> None:
    set_proxy_host("127.0.0.1")
    assert application._rest_options(settings()) == {"keys": None, "origins": [], "page": True}
    assert not application._rest_options(settings(page=False))["page"]
    with pytest.raises(ConfigError, match="api_keys_file '/no/keys' cannot be read: No such file"):
        application._rest_options(settings(api_keys_file="/no/keys"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"api_keys_file": "keys"}, "api_keys_file 'keys' must be an absolute path"),
        ({"allowed_origins": ["chat.example"]}, "'chat.example' must be SCHEME://HOST"),
        ({"allowed_origins": ["https://chat.example/"]}, "must be SCHEME://HOST"),
        ({"allowed_origins": ["https://Chat.example"]}, "must be SCHEME://HOST"),
        ({"allowed_origins": ["https://*.example"]}, "must be SCHEME://HOST"),
        ({"allowed_origins": "https://chat.example"}, "allowed_origins"),
        ({"tool_call_parser": "hermez"}, "tool_call_parser 'hermez' is not known; known are auto, none, hermes"),
        ({"reasoning_parser": "r1"}, "reasoning_parser 'r1' is not known; known are auto, none, think"),
        ({"tool_call_parser": "hermes", "reasoning_parser": "gpt-oss"}, "do not go together"),
        ({"api_key": "x"}, "unknown setting 'api_key'; did you mean 'api_keys_file'"),
    ],
)
def test_invalid_settings_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as captured_error:
        settings(**fields)
    assert message in str(captured_error.value)


def test_parser_names_of_other_servers_are_accepted() -> None:
    assert settings().parsers == (None, None)
    assert settings(tool_call_parser="auto", reasoning_parser="deepseek-r1").parsers == (None, "think")
    assert settings(tool_call_parser="qwen25", reasoning_parser="none").parsers == ("hermes", "none")
    assert settings(tool_call_parser="openai", reasoning_parser="openai_gptoss").parsers == ("gpt-oss", "gpt-oss")


def test_valid_allowed_origins_are_accepted() -> None:
    origins = ["*", "https://chat.example", "http://localhost:3000", "http://[::1]:3000", "chrome-extension://abcdef"]
    assert settings(allowed_origins=origins).allowed_origins == origins
