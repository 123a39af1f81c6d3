"""Names of hub models in an application's settings are resolved to commits once, whichever setting holds them."""

from pathlib import Path
from typing import Any

import pytest

from cluster.api.launch.plan import make_plan
from cluster.api.serve.model_sources import hub_source_facts, pin_hub_models
from cluster.api.serve.settings import AppSettings, parse
from cluster.config import ConfigError
from tests.hub.conftest import hub
from tests.support.fake_hub import FakeHub, commit_of
from tests.support.tiny_checkpoints import draft_folder, target_folder

__all__ = ["hub"]  # the fixture

MAIN = f"main#{commit_of('main')}"


@pytest.fixture
def models(hub: FakeHub) -> FakeHub:
    hub.add("org/target", target_folder())
    hub.add("org/draft", draft_folder(target_folder()))
    return hub


def settings(kwargs: dict[str, Any], **loading: Any) -> AppSettings:
    llm = {"model_loading_config": {"model_id": "m", **loading}, "engine_kwargs": kwargs}
    return parse({"llm_configs": [llm]})


@pytest.mark.parametrize(
    "draft",
    [
        {"speculative_draft_model_path": "org/draft"},
        {"speculative_draft_model": "org/draft"},
        {"speculative_config": {"model": "org/draft", "num_speculative_tokens": 2}},
    ],
)
def test_pin_hub_models_pins_target_tokenizer_and_draft_to_commits(models: FakeHub, draft: dict[str, Any]) -> None:
    app_settings = settings(draft, model_source="org/target", tokenizer_source="org/target")
    pinned_settings = pin_hub_models(app_settings)
    engine = pinned_settings.llm.engine_config()
    assert engine.model_path == engine.tokenizer_path == f"hf://org/target@{MAIN}"
    assert engine.speculative_draft_model_path == f"hf://org/draft@{MAIN}"
    assert engine.speculative_num_steps == app_settings.llm.engine_config().speculative_num_steps
    assert pinned_settings.llm.model_loading_config.model_id == "m"
    request_count = len(models.log)
    assert sum("/revision/" in sent.path for sent in models.log) == 2, "a name that is set twice is resolved once"
    assert pin_hub_models(pinned_settings) == pinned_settings and len(models.log) == request_count, (
        "a pinned name needs no request"
    )
    assert hub_source_facts(engine)["draft_commit"] == commit_of("main")
    assert hub_source_facts(engine)["model_revision"] == "main"


def test_pin_hub_models_accepts_hub_name_as_model_id_and_leaves_folders(models: FakeHub) -> None:
    pinned_settings = pin_hub_models(settings({}, model_id="org/target"))
    assert pinned_settings.llm.model_loading_config.model_source == f"hf://org/target@{MAIN}"
    assert pinned_settings.llm.model_loading_config.model_id == "org/target"
    folder = settings({}, model_source=target_folder())
    assert pin_hub_models(folder) == folder


def test_make_plan_checks_hub_models_without_downloading_weights(models: FakeHub) -> None:
    plan = make_plan(None, [("speculative_draft_model_path", "org/draft"), ("tp_size", 2)], "org/target@main")
    assert plan.settings.llm.model_loading_config.model_id == "org/target" and not plan.unused_draft_note
    assert plan.engine.model_path == f"hf://org/target@{MAIN}"
    with pytest.raises(ConfigError, match=r"cannot be split over 3 ranks"):
        make_plan(None, [("tp_size", 3)], "org/target")
    with pytest.raises(ConfigError, match=rf"'org/target@{commit_of('main')}' is a whole model, not a draft"):
        make_plan(None, [("speculative_draft_model_path", "org/target")], "org/target")
    full_requests = [request for request in models.downloads("model.safetensors") if not request.range]
    assert not full_requests, "only headers were read"


def test_unused_draft_note_names_the_hub_model_of_the_draft(models: FakeHub, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "applications: [{args: {llm_configs: [{model_loading_config: {model_id: m, model_source: org/target},"
        " engine_kwargs: {speculative_draft_model_path: org/draft}}]}}]"
    )
    assert not make_plan(str(file), ["speculative_algorithm=null"]).unused_draft_note
    assert "'org/draft' belongs to 'org/target'" in make_plan(str(file), [], target_folder()).unused_draft_note
