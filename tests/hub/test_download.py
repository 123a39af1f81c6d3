"""Models of a hub are downloaded completely and once, and only the files that serving needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from cluster.arch.hub import fetch, hub_models, pin, snapshot
from cluster.arch.hub.snapshot import is_complete
from cluster.config import ConfigError, EngineConfig
from tests.hub.conftest import use_hub
from tests.support.fake_hub import FakeHub, commit_of
from tests.support.tiny_checkpoints import draft_folder, target_folder

WEIGHTS = "model.safetensors"
UNWANTED = (
    "pytorch_model.bin",
    "model.pt",
    "model-Q4.gguf",
    "modeling.py",
    "README.md",
    "training_args.bin",
    "original/params.json",
    "onnx/model.onnx",
    "extra.safetensors",
)


@pytest.fixture
def repository_folder(tmp_path: Path) -> Path:
    """The folder of a target as it is in hub repositories: it also has pickles, code and other unwanted formats."""
    folder = tmp_path / "repository"
    shutil.copytree(target_folder(), folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not wanted")
    return folder


def settings(model: str = "org/model", **more: object) -> EngineConfig:
    return EngineConfig.model_validate({"model_path": model, **more})


def fetch_model(model: str = "org/model") -> Path:
    return Path(fetch(settings(model)).model_path)


def requested_files(hub: FakeHub) -> set[str]:
    """The files that the client requested, in whole or in part, with or without success."""
    return {sent.path.partition("/resolve/")[2].partition("/")[2] for sent in hub.log if "/resolve/" in sent.path}


def cached_blobs(hub: FakeHub) -> list[str]:
    """The blob files in the cache, complete or incomplete."""
    return [str(path) for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*")]


def test_only_served_files_are_downloaded(hub: FakeHub, repository_folder: Path) -> None:
    hub.add("org/model", repository_folder)
    folder = fetch_model()
    served = {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", WEIGHTS}
    assert {path.name for path in folder.iterdir()} == served == requested_files(hub)
    assert (folder / WEIGHTS).read_bytes() == (repository_folder / WEIGHTS).read_bytes()
    assert folder.name == commit_of("main") and "models--org--model" in str(folder)
    hub.log.clear()
    assert fetch_model() == folder and not hub.downloads(WEIGHTS), "the weights are in the cache"
    assert fetch_model(f"org/model@{commit_of('main')}") == folder
    assert [sent.path for sent in hub.log] == ["/api/models/org/model/revision/main"], "a commit needs no request"


def test_sharded_weights_are_downloaded_as_listed_in_the_index(hub: FakeHub, repository_folder: Path) -> None:
    tensors = load_file(repository_folder / WEIGHTS)
    (repository_folder / WEIGHTS).unlink()
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for at, (name, tensor) in enumerate(tensors.items()):
        list(parts.values())[at % 2][name] = tensor
    for part, part_tensors in parts.items():
        save_file(part_tensors, repository_folder / part)
    index = {name: part for part, part_tensors in parts.items() for name in part_tensors}
    (repository_folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
    hub.add("org/model", repository_folder)
    folder = fetch_model()
    assert {path.name for path in folder.glob("*.safetensors")} == parts.keys()
    assert "extra.safetensors" not in requested_files(hub)


def test_a_revision_is_resolved_once(hub: FakeHub, repository_folder: Path, tmp_path: Path) -> None:
    """The revisions of target and draft are resolved to commits once. A branch that moves later does not change the
    commit that is served.
    """
    other_folder = tmp_path / "other"
    shutil.copytree(repository_folder, other_folder)
    (other_folder / "chat_template.jinja").write_text("another")
    target = hub.add("org/model", repository_folder)
    target.revisions |= {"refs/pr/1": other_folder, "v2": other_folder}
    hub.add("org/draft", draft_folder(target_folder()))
    pinned = pin(settings("org/model@v2", speculative_draft_model_path="org/draft"))
    assert {name: (m.name, m.revision, m.commit) for name, m in hub_models(pinned).items()} == {
        "model_path": ("org/model", "v2", commit_of("v2")),
        "speculative_draft_model_path": ("org/draft", "main", commit_of("main")),
    }
    target.revisions["moved"] = repository_folder
    request_count = len(hub.log)
    assert pin(pinned) == pinned and len(hub.log) == request_count
    fetched_config = fetch(pinned)
    assert (Path(fetched_config.model_path) / "chat_template.jinja").read_text() == "another"
    assert (Path(fetched_config.speculative_draft_model_path or "") / WEIGHTS).is_file()
    assert fetch_model("org/model@refs/pr/1").name == commit_of("refs/pr/1")
    assert (fetch_model() / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("hub_state", ["offline", "unreachable"])
def test_cached_model_is_served_without_a_network(
    hub: FakeHub, repository_folder: Path, hub_state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/model", repository_folder)
    hub.add("org/half", repository_folder)
    folder = fetch_model()
    snapshot.fetch_config_files(
        snapshot.resolve_commit(hub_models(settings("org/half"))["model_path"])
    )  # only its config files
    hub.log.clear()
    if hub_state == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        use_hub(monkeypatch, "http://127.0.0.1:9")
    assert fetch_model() == folder and not hub.log
    for name in ("org/half", "org/other"):
        with pytest.raises(ConfigError) as refusal:
            fetch_model(name)
        message = str(refusal.value)
        assert f"model folder '{name}' does not exist" in message
        if hub_state == "offline":
            assert "HF_HUB_OFFLINE is set" in message and f"hf download {name} --revision" in message
            assert (WEIGHTS in message) == (name == "org/half")
        else:
            assert "cannot be had from http://127.0.0.1:9" in message and "the hub cannot be reached" in message


def test_cache_without_a_file_list_is_used_unchecked(
    hub: FakeHub, repository_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of `huggingface_hub` left such a cache."""
    hub.add("org/model", repository_folder)
    folder = fetch_model()
    copy = folder.parents[2] / "models--org--older" / "snapshots" / folder.name
    shutil.copytree(folder, copy)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model(f"org/older@{folder.name}") == copy


def test_interrupted_download_resumes_where_the_connection_ended(
    hub: FakeHub, repository_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4)  # bytes per write; 10 MB by default
    size = (repository_folder / WEIGHTS).stat().st_size
    at = size // 8 * 4
    hub.add("org/model", repository_folder, cut_after={WEIGHTS: at})
    snapshot.fetch_config_files(snapshot.resolve_commit(hub_models(settings())["model_path"]))
    hub.log.clear()
    folder = snapshot.fetch_all_files(hub_models(settings())["model_path"]).folder
    assert (folder / WEIGHTS).read_bytes() == (repository_folder / WEIGHTS).read_bytes()
    requests = hub.downloads(WEIGHTS)
    assert [(request.range, request.status) for request in requests] == [("", 200), (f"bytes={at}-", 206)]
    assert sum(request.bytes for request in requests) == size, "no byte was sent twice"


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_damaged_files_are_refused_by_name(hub: FakeHub, repository_folder: Path, file: str) -> None:
    repository = hub.add("org/model", repository_folder)
    model = snapshot.resolve_commit(hub_models(settings())["model_path"])
    if file == WEIGHTS:
        snapshot.fetch_config_files(model)
    repository.damaged = {file}
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"arrived damaged: {file} has hash \w+, and \w+ is listed"):
            snapshot.fetch_all_files(model)
        snapshot_folder = Path(constants.HF_HUB_CACHE) / "models--org--model" / "snapshots" / model.commit
        assert not (snapshot_folder / file).exists() and len(cached_blobs(hub)) == len(list(snapshot_folder.iterdir()))
    repository.damaged = set()
    assert is_complete(snapshot.fetch_all_files(model))


def test_damage_is_found_after_a_process_died(
    hub: FakeHub, repository_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process had downloaded all files and had not yet compared any hash."""
    hub.add("org/model", repository_folder, damaged={WEIGHTS})
    model = snapshot.resolve_commit(hub_models(settings())["model_path"])
    snapshot.fetch_config_files(model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(snapshot, "_verify", lambda found: (_ for _ in ()).throw(KeyboardInterrupt))
        snapshot.fetch_all_files(model)
    with pytest.raises(ConfigError, match=f"arrived damaged: {WEIGHTS}"):
        snapshot.fetch_config_files(model)


def test_file_of_wrong_size_is_refused_by_name(hub: FakeHub, repository_folder: Path) -> None:
    repository = hub.add("org/model", repository_folder, overstated={WEIGHTS})
    with pytest.raises(ConfigError, match=rf"should be of size \d+ but has size \d+ .*{WEIGHTS}.*The file is not kept"):
        fetch_model()
    assert not list(Path(constants.HF_HUB_CACHE).rglob(WEIGHTS))
    repository.overstated = set()
    fetch_model()


def test_insufficient_disk_space_is_reported_before_downloading(
    hub: FakeHub, repository_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/model", repository_folder)
    free = shutil.disk_usage(repository_folder)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(ConfigError, match=r"org/model@\w+ needs 0.00 GB in .*cache.*0.00 GB free; make room there"):
        fetch_model()
    assert not hub.downloads(f"cdn/{WEIGHTS}") and not list(Path(constants.HF_HUB_CACHE).rglob(WEIGHTS))


LIMITED = """
import resource
from cluster.arch.hub import hub_model
from cluster.arch.hub.snapshot import fetch_all_files, resolve_commit
from cluster.config import ConfigError
model = resolve_commit(hub_model("org/model"))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    fetch_all_files(model)
except ConfigError as error:
    print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(fetch_all_files(model).folder)
"""


def environment(hub: FakeHub) -> dict[str, str]:
    """The environment variables of a separate process that uses `hub` and the cache of this test."""
    hub_variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "OMP_NUM_THREADS": "1"}
    return {**{k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")}, **hub_variables}


def test_write_failure_during_download_is_reported_and_retry_succeeds(hub: FakeHub, repository_folder: Path) -> None:
    """The operating system limits the size of files. Without the limit the download succeeds, and each small file has
    been downloaded once.
    """
    hub.add("org/model", repository_folder)
    process = subprocess.run([sys.executable, "-c", LIMITED], env=environment(hub), capture_output=True, text=True)
    assert not process.returncode, process.stderr
    refusal, folder = process.stdout.splitlines()
    assert f"{constants.HF_HUB_CACHE!r} cannot be written: File too large; make room there" in refusal, process.stderr
    assert (Path(folder) / WEIGHTS).read_bytes() == (repository_folder / WEIGHTS).read_bytes()
    config_requests = [sent.path for sent in hub.downloads("config.json")]
    assert len(config_requests) == len(set(config_requests)) == 3, (
        "config, generation_config and tokenizer_config, once each"
    )


FETCH = """
import sys
from cluster.arch.hub import fetch
from cluster.config import EngineConfig
sys.stdin.readline()
print(fetch(EngineConfig(model_path="org/model")).model_path)
"""


def test_concurrent_processes_download_each_file_once(hub: FakeHub, repository_folder: Path) -> None:
    hub.add("org/model", repository_folder)
    command = [sys.executable, "-c", FETCH]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment(hub), **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    folders = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(folders) == 1 and is_complete(
        snapshot.fetch_config_files(hub_models(settings(f"org/model@{commit_of('main')}"))["model_path"])
    )
    full_requests = [sent for sent in hub.downloads() if "/resolve/" in sent.path and not sent.range]
    assert len(full_requests) == len({sent.path for sent in full_requests}) == 5
