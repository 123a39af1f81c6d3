"""Models of a hub are downloaded whole, once, and only what is served of them."""

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
from tests.fake_hub import FakeHub, commit_of
from tests.tiny import draft_folder, target_folder
from tests.unit.arch.hub.conftest import use

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
def files(tmp_path: Path) -> Path:
    """A target as repositories hold it: with pickles, code and other formats beside what is served."""
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


def fetched(model: str = "org/model") -> Path:
    return Path(fetch(settings(model)).model_path)


def names(hub: FakeHub) -> set[str]:
    """The files that the client requested, in whole or in part, with or without success."""
    return {sent.path.partition("/resolve/")[2].partition("/")[2] for sent in hub.log if "/resolve/" in sent.path}


def blobs(hub: FakeHub) -> list[str]:
    """What lies in the cache, whole or not."""
    return [str(path) for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*")]


def test_only_served_files_are_downloaded(hub: FakeHub, files: Path) -> None:
    hub.add("org/model", files)
    folder = fetched()
    served = {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", WEIGHTS}
    assert {path.name for path in folder.iterdir()} == served == names(hub)
    assert (folder / WEIGHTS).read_bytes() == (files / WEIGHTS).read_bytes()
    assert folder.name == commit_of("main") and "models--org--model" in str(folder)
    hub.log.clear()
    assert fetched() == folder and not hub.downloads(WEIGHTS), "it is in the cache now"
    assert fetched(f"org/model@{commit_of('main')}") == folder
    assert [sent.path for sent in hub.log] == ["/api/models/org/model/revision/main"], "a commit needs no request"


def test_sharded_weights_are_downloaded_as_listed_in_the_index(hub: FakeHub, files: Path) -> None:
    tensors = load_file(files / WEIGHTS)
    (files / WEIGHTS).unlink()
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for at, (name, tensor) in enumerate(tensors.items()):
        list(parts.values())[at % 2][name] = tensor
    for part, held in parts.items():
        save_file(held, files / part)
    index = {name: part for part, held in parts.items() for name in held}
    (files / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
    hub.add("org/model", files)
    folder = fetched()
    assert {path.name for path in folder.glob("*.safetensors")} == parts.keys()
    assert "extra.safetensors" not in names(hub)


def test_a_revision_is_resolved_once(hub: FakeHub, files: Path, tmp_path: Path) -> None:
    """The draft too; and where the branch has moved on since, the commit that was found at first is served."""
    other = tmp_path / "other"
    shutil.copytree(files, other)
    (other / "chat_template.jinja").write_text("another")
    target = hub.add("org/model", files)
    target.revisions |= {"refs/pr/1": other, "v2": other}
    hub.add("org/draft", draft_folder(target_folder()))
    pinned = pin(settings("org/model@v2", speculative_draft_model_path="org/draft"))
    assert {name: (m.name, m.revision, m.commit) for name, m in hub_models(pinned).items()} == {
        "model_path": ("org/model", "v2", commit_of("v2")),
        "speculative_draft_model_path": ("org/draft", "main", commit_of("main")),
    }
    target.revisions["moved"] = files
    asked = len(hub.log)
    assert pin(pinned) == pinned and len(hub.log) == asked
    found = fetch(pinned)
    assert (Path(found.model_path) / "chat_template.jinja").read_text() == "another"
    assert (Path(found.speculative_draft_model_path or "") / WEIGHTS).is_file()
    assert fetched("org/model@refs/pr/1").name == commit_of("refs/pr/1")
    assert (fetched() / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("how", ["offline", "unreachable"])
def test_cached_model_is_served_without_a_network(
    hub: FakeHub, files: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/model", files)
    hub.add("org/half", files)
    folder = fetched()
    snapshot.fetch_config_files(
        snapshot.resolve_commit(hub_models(settings("org/half"))["model_path"])
    )  # its configs alone
    hub.log.clear()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        use(monkeypatch, "http://127.0.0.1:9")
    assert fetched() == folder and not hub.log
    for name in ("org/half", "org/other"):
        with pytest.raises(ConfigError) as refusal:
            fetched(name)
        said = str(refusal.value)
        assert f"model folder '{name}' does not exist" in said
        if how == "offline":
            assert "HF_HUB_OFFLINE is set" in said and f"hf download {name} --revision" in said
            assert (WEIGHTS in said) == (name == "org/half")
        else:
            assert "cannot be had from http://127.0.0.1:9" in said and "the hub cannot be reached" in said


def test_cache_without_a_file_list_is_used_unchecked(
    hub: FakeHub, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older versions of the library left it."""
    hub.add("org/model", files)
    folder = fetched()
    copy = folder.parents[2] / "models--org--older" / "snapshots" / folder.name
    shutil.copytree(folder, copy)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched(f"org/older@{folder.name}") == copy


def test_interrupted_download_resumes_where_the_connection_ended(
    hub: FakeHub, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4)  # what is written at a time, 10 MB otherwise
    size = (files / WEIGHTS).stat().st_size
    at = size // 8 * 4
    hub.add("org/model", files, cut={WEIGHTS: at})
    snapshot.fetch_config_files(snapshot.resolve_commit(hub_models(settings())["model_path"]))
    hub.log.clear()
    folder = snapshot.fetch_all_files(hub_models(settings())["model_path"]).folder
    assert (folder / WEIGHTS).read_bytes() == (files / WEIGHTS).read_bytes()
    sent = hub.downloads(WEIGHTS)
    assert [(one.range, one.status) for one in sent] == [("", 200), (f"bytes={at}-", 206)]
    assert sum(one.bytes for one in sent) == size, "no byte came twice"


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_damaged_files_are_refused_by_name(hub: FakeHub, files: Path, file: str) -> None:
    repository = hub.add("org/model", files)
    model = snapshot.resolve_commit(hub_models(settings())["model_path"])
    if file == WEIGHTS:
        snapshot.fetch_config_files(model)
    repository.damaged = {file}
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"arrived damaged: {file} has hash \w+, and \w+ is listed"):
            snapshot.fetch_all_files(model)
        there = Path(constants.HF_HUB_CACHE) / "models--org--model" / "snapshots" / model.commit
        assert not (there / file).exists() and len(blobs(hub)) == len(list(there.iterdir()))
    repository.damaged = set()
    assert is_complete(snapshot.fetch_all_files(model))


def test_damage_is_found_after_a_process_died(hub: FakeHub, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had downloaded everything, and compared nothing yet."""
    hub.add("org/model", files, damaged={WEIGHTS})
    model = snapshot.resolve_commit(hub_models(settings())["model_path"])
    snapshot.fetch_config_files(model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(snapshot, "_verify", lambda found: (_ for _ in ()).throw(KeyboardInterrupt))
        snapshot.fetch_all_files(model)
    with pytest.raises(ConfigError, match=f"arrived damaged: {WEIGHTS}"):
        snapshot.fetch_config_files(model)


def test_file_of_wrong_size_is_refused_by_name(hub: FakeHub, files: Path) -> None:
    repository = hub.add("org/model", files, short={WEIGHTS})
    with pytest.raises(ConfigError, match=rf"should be of size \d+ but has size \d+ .*{WEIGHTS}.*The file is not kept"):
        fetched()
    assert not list(Path(constants.HF_HUB_CACHE).rglob(WEIGHTS))
    repository.short = set()
    fetched()


def test_insufficient_disk_space_is_reported_before_downloading(
    hub: FakeHub, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/model", files)
    free = shutil.disk_usage(files)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(ConfigError, match=r"org/model@\w+ needs 0.00 GB in .*cache.*0.00 GB free; make room there"):
        fetched()
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
    """That of a process of its own, which reads what is set there."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "OMP_NUM_THREADS": "1"}
    return {**{k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")}, **own}


def test_write_failure_during_download_is_reported_and_retry_succeeds(hub: FakeHub, files: Path) -> None:
    """The system itself refuses to let a file grow; once it may, the download succeeds and small files come once."""
    hub.add("org/model", files)
    ended = subprocess.run([sys.executable, "-c", LIMITED], env=environment(hub), capture_output=True, text=True)
    assert not ended.returncode, ended.stderr
    refusal, folder = ended.stdout.splitlines()
    assert f"{constants.HF_HUB_CACHE!r} cannot be written: File too large; make room there" in refusal, ended.stderr
    assert (Path(folder) / WEIGHTS).read_bytes() == (files / WEIGHTS).read_bytes()
    assert len(hub.downloads("config.json")) == 3, "config, generation_config and tokenizer_config, once each"


FETCH = """
import sys
from cluster.arch.hub import fetch
from cluster.config import EngineConfig
sys.stdin.readline()
print(fetch(EngineConfig(model_path="org/model")).model_path)
"""


def test_concurrent_processes_download_each_file_once(hub: FakeHub, files: Path) -> None:
    hub.add("org/model", files)
    command = [sys.executable, "-c", FETCH]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=environment(hub), **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    folders = {process.communicate(timeout=120)[0].strip() for process in started}
    assert len(folders) == 1 and is_complete(
        snapshot.fetch_config_files(hub_models(settings(f"org/model@{commit_of('main')}"))["model_path"])
    )
    whole = [sent for sent in hub.downloads() if "/resolve/" in sent.path and not sent.range]
    assert len(whole) == len({sent.path for sent in whole}) == 5
