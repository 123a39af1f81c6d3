"""`aerie serve` with model names of a hub: two ranks load one commit, and this machine downloads each file once."""

from pathlib import Path

import httpx
import pytest

from tests.serving.actors.test_serve_command import aerie_serve, free_port, wait_for
from tests.support.fake_hub import commit_of, fake_hub
from tests.support.tiny_checkpoints import draft_folder, target_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_serve_downloads_target_and_draft_from_the_hub_once(tmp_path: Path) -> None:
    port, hub_home = free_port(), tmp_path / "home"
    target = target_folder()
    with fake_hub() as hub:
        hub.add("org/target", target)
        hub.add("org/draft", draft_folder(target))
        settings = [f"http_port={port}", "model=org/target", "speculative_draft_model_path=org/draft@main", "tp_size=2"]
        settings += ["dtype=float64", "attn_dp_size=2", "max_running_requests=4"]
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "0"}
        with aerie_serve(*settings, log=tmp_path / "server.log", **environment) as process:
            console_text = wait_for(process, "READY ")
            commit = commit_of("main")
            assert f"org/target: revision main is commit {commit}" in console_text
            body = {"model": "org/target", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0}
            response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=20)
            assert response.status_code == 200, response.text
            info = httpx.get(f"http://127.0.0.1:{port}/server_info", timeout=20).json()
            process.terminate()
            assert process.wait(timeout=60) == 0
    assert (info["model_source"], info["model_revision"], info["model_commit"]) == ("org/target", "main", commit)
    assert (info["draft_source"], info["draft_commit"]) == ("org/draft", commit)
    folder = hub_home / "hub" / "models--org--target" / "snapshots" / commit
    assert info["config"]["model_path"] == str(folder) and f"org/target: in {folder}" in console_text
    full_downloads = [
        hub_response.path
        for hub_response in hub.downloads()
        if "/resolve/" in hub_response.path and not hub_response.range
    ]
    assert sorted(full_downloads) == sorted(set(full_downloads)) and len(full_downloads) == 5, (
        "2 target configs, 1 draft config, 2 weight files"
    )
    revision_lookups = [hub_response.path for hub_response in hub.log if "/revision/" in hub_response.path]
    assert len(revision_lookups) == 2, "one lookup for each name, however many processes load it"
