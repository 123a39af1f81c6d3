"""A model that cannot be downloaded is refused with a message that says what to do. Also: which texts name a model of
a hub.
"""

from pathlib import Path

import pytest
from huggingface_hub import constants

from cluster.arch.hub import HubModel, fetch, hub_model, pin
from cluster.config import ConfigError, EngineConfig
from tests.support.fake_hub import TOKEN, FakeHub, commit_of
from tests.support.tiny_checkpoints import target_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def pin_model(model: str) -> EngineConfig:
    return pin(EngineConfig(model_path=model))


def test_missing_revision_error_lists_existing_branches(hub: FakeHub) -> None:
    folder = Path(target_folder())
    hub.add("org/model", folder).revisions |= {f"v{i}": folder for i in range(6)}
    with pytest.raises(ConfigError, match=r"has no revision 'v9'; it has branches main, v0, v1, v2, v3, \.\.\.$"):
        pin_model("org/model@v9")


def test_missing_model_error_names_the_hub_and_the_token(hub: FakeHub) -> None:
    with pytest.raises(ConfigError) as captured_error:
        pin_model("org/nothing")
    assert "model folder 'org/nothing' does not exist" in str(captured_error.value)
    assert f"cannot be had from {hub.url}" in str(captured_error.value)
    assert "no such model is there, or it is private; check the name, and that HF_TOKEN" in str(captured_error.value)


def test_a_gated_model_needs_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/gated", target_folder(), gated=True)
    licence = f"it is gated: accept its licence at {hub.url}/org/gated and "
    with pytest.raises(ConfigError, match=f"{licence}set HF_TOKEN to a token of that account"):
        fetch(EngineConfig(model_path="org/gated"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(ConfigError, match=f"{licence}use a token of that account"):
        fetch(EngineConfig(model_path="org/gated"))
    assert not list(Path(constants.HF_HUB_CACHE).rglob("blobs/*"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (Path(fetch(EngineConfig(model_path="org/gated")).model_path) / "model.safetensors").is_file()


def test_internal_errors_are_not_reported_as_hub_errors(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", target_folder())
    monkeypatch.setattr("cluster.arch.hub.snapshot.get_cached_repo_tree", lambda *arguments, **keywords: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fetch(EngineConfig(model_path="org/model"))


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
        ("gpt2", HubModel("gpt2")),
        ("Qwen/Qwen3-8B@v1.0", HubModel("Qwen/Qwen3-8B", "v1.0")),
        ("Qwen/Qwen3-8B@refs/pr/3", HubModel("Qwen/Qwen3-8B", "refs/pr/3")),
        (f"org/m@{COMMIT}", HubModel("org/m", COMMIT, COMMIT)),
        (f"hf://org/m@main#{COMMIT}", HubModel("org/m", "main", COMMIT)),
        ("hf://org/m", HubModel("org/m")),
        ("/models/m", None),
        ("./m", None),
        ("../m", None),
        ("models/demo/target", None),
        ("~/m", None),
        ("", None),
    ],
)
def test_hub_model_parses_hub_names_and_ignores_paths(text: str, model: HubModel | None) -> None:
    assert hub_model(text) == model
    assert model is None or hub_model(str(model)) == model


@pytest.mark.parametrize(
    ("text", "message"), [("org/m@", "no revision after its @"), ("hf:///models/m", "does not name a model of a hub")]
)
def test_invalid_hub_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hub_model(text)


def test_existing_folder_takes_precedence_over_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/model") is None and pin_model("org/model").model_path == "org/model"
    assert not hub.log
    hub.add("org/model", target_folder())
    assert pin_model("hf://org/model").model_path == f"hf://org/model@main#{commit_of('main')}"
