"""`aerie serve` checks before anything starts who may use the server: API keys, or allow_unauthenticated, and never a
key on the command line.
"""

import argparse
from pathlib import Path

import pytest

from cluster.api.launch import flags, serve
from cluster.api.launch.keys import create
from cluster.api.launch.plan import ServePlan, make_plan
from cluster.config import ConfigError
from tests.support.tiny_checkpoints import target_folder


def plan_of(*arguments: str) -> ServePlan:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    args = parser.parse_args(arguments)
    return make_plan(args.config, flags.overrides_of(args), flags.model_of(args))


def test_plan_beyond_loopback_accepts_keys_or_allow_unauthenticated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AERIE_API_KEY", raising=False)
    target, outside = target_folder(), "http_host=0.0.0.0"
    assert make_plan(None, [outside, "allow_unauthenticated=true"]).keys is None
    file = tmp_path / "keys"
    create(file, "ann", "use")
    monkeypatch.chdir(tmp_path)
    assert str(plan_of(target, "--api-keys-file", "keys", "--host", "0.0.0.0").keys) == "ann (use)"
    assert plan_of(target, "--api-keys-file", "keys").settings.api_keys_file == str(file), "also on loopback"
    with pytest.raises(ConfigError, match="api_keys_file '/no/keys' cannot be read"):
        plan_of(target, "--api-keys-file", "/no/keys")
    monkeypatch.setenv("AERIE_API_KEY", "sk-a-key-of-the-environment")
    assert str(make_plan(None, [outside]).keys) == "AERIE_API_KEY (use)"


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key", "--api-ke"])
def test_key_on_the_command_line_is_refused_and_not_echoed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_of(target_folder(), flag, "sk-a-secret")
    error_output = capsys.readouterr().err
    assert "sk-a-secret" not in error_output
    assert "AERIE_API_KEY" in error_output or "ambiguous" in error_output


def test_serve_on_a_running_cluster_refuses_environment_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AERIE_API_KEY", "sk-a-key-of-the-environment")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ConfigError, match="only where they are set before `ray start`"):
        serve.run(parser.parse_args(["--address", "auto"]))
