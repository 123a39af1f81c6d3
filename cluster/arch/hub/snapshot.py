"""The files of one commit of a model in this node's cache: which files are used, how they are downloaded and verified.

A model's files are its weights and its description: configs, tokenizer and chat template (`DESCRIPTION_FILES`).
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock

from cluster.arch.hub.names import HubModel
from cluster.arch.hub.progress import Check, run_with_progress
from cluster.arch.hub.refusals import damaged_error, disk_full_error, explain_failures, not_cached_error
from cluster.arch.safetensors.stored import weight_files
from cluster.config import ConfigError

logger = logging.getLogger(__name__)

DESCRIPTION_FILES = (
    "config.json",
    "generation_config.json",
    "params.json",
    "draft_sample.json",
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files that are used besides the weights. No other files are downloaded: no pickles, GGUF or code."""
CONFIG_FILES = ("config.json", "params.json")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The folder in the cache that holds, or will hold, the files of a commit.

    `files` maps the names of the files at the top level of the repository to their sizes and hashes. If neither the
    cache nor the hub has this list, `files` is None, and the folder is used as it is.
    """

    model: HubModel
    folder: Path
    files: Mapping[str, RepoFile] | None

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the entries of `names` that are not in the folder."""
        return [name for name in names if not (self.folder / name).exists()]

    @property
    def unverified_path(self) -> Path:
        """The path of a file that lists the downloaded files whose hashes have not been compared. It is in the folder
        of the library's locks.
        """
        repository = self.folder.parents[1]
        return repository.parent / ".locks" / repository.name / f"aerie-{self.model.commit}.json"


def resolve_commit(model: HubModel) -> HubModel:
    """Return the model with the commit that its revision names at present. If the hub is unreachable, the cache
    decides.

    Raises:
        ConfigError: the model or revision does not exist, or neither the hub nor the cache knows the commit.
    """
    if model.commit:
        return model
    with explain_failures(model):
        return replace(model, commit=HfApi().resolve_revision(model.name, revision=model.revision).resolved)


def fetch_config_files(model: HubModel) -> Snapshot:
    """Return the snapshot of a model, after its description (`DESCRIPTION_FILES`) has been downloaded into its folder.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    model = resolve_commit(model)
    repository = Path(constants.HF_HUB_CACHE).expanduser().resolve() / f"models--{model.name.replace('/', '--')}"
    folder = repository / "snapshots" / model.commit
    with explain_failures(model):
        repo_files = _list_files(model, folder)
    snapshot = Snapshot(model, folder, repo_files)
    if repo_files is not None:
        _fetch_missing(snapshot, [name for name in DESCRIPTION_FILES if name in repo_files])
    return snapshot


def fetch_all_files(model: HubModel, check: Check | None = None) -> Snapshot:
    """Return the snapshot of a model, after all files, weights included, have been downloaded into its folder. `check`
    is called regularly during the download, and may raise to end it.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    snapshot = fetch_config_files(model)
    _fetch_missing(snapshot, weight_names(snapshot), check)
    return snapshot


def is_complete(snapshot: Snapshot) -> bool:
    """Whether the folder holds all weights, and all downloads have been verified. Without a list of files, the folder
    counts as complete.
    """
    if snapshot.files is None:
        return True
    names = weight_names(snapshot)
    return bool(names) and not snapshot.missing(names) and not snapshot.unverified_path.exists()


def weight_names(snapshot: Snapshot) -> list[str]:
    """Return the names of the weight files, as `weight_files` would choose them in a folder with all listed files.
    Empty if `snapshot.files` is None.
    """
    if snapshot.files is None:
        return []
    with tempfile.TemporaryDirectory(prefix="aerie-names-") as temporary_folder:
        mirror(snapshot, Path(temporary_folder), sized=False)
        try:
            files, _ = weight_files(temporary_folder)
        except ConfigError as error:
            raise ConfigError(str(error).replace(temporary_folder, snapshot.model.display_name)) from None
        return [path.name for path in files if path.name in snapshot.files]


def mirror(snapshot: Snapshot, destination: Path, *, sized: bool) -> None:
    """Fill the empty folder `destination` with one entry per listed file.

    A file of the description that is in the cache becomes a link. Any other file becomes a file without data: a sparse
    file of the true size if `sized`, otherwise an empty file.

    Raises:
        OSError: the disk cannot hold a sparse file of that size.
    """
    for name, file in (snapshot.files or {}).items():
        if name in DESCRIPTION_FILES and (snapshot.folder / name).exists():
            (destination / name).symlink_to(snapshot.folder / name)
        else:
            (destination / name).touch()
            os.truncate(destination / name, file.size if sized else 0)


def _list_files(model: HubModel, folder: Path) -> dict[str, RepoFile] | None:
    """Return the list of files at the top level of the repository, from the cache or, if missing there, from the hub.

    Return None if neither has the list, but configs of the commit are in the cache. This happens if the files were put
    there by hand, or by an older version of the library.
    """
    try:
        files = get_cached_repo_tree(model.name, revision=model.commit)
    except CachedRepoTreeNotFoundError:
        has_configs = any((folder / name).exists() for name in CONFIG_FILES)
        if constants.HF_HUB_OFFLINE and has_configs:
            return None
        if constants.HF_HUB_OFFLINE:
            raise not_cached_error(model, []) from None
        try:
            tree = HfApi().list_repo_tree(model.name, revision=model.commit)
            files = [file for file in tree if isinstance(file, RepoFile)]
        except Exception as error:
            if not has_configs:
                raise
            logger.warning(
                "%s is served from %s as it is, since the hub gave no list: %s", model.display_name, folder, error
            )
            return None
    return {file.path: file for file in files if "/" not in file.path}


def _fetch_missing(snapshot: Snapshot, names: Sequence[str], check: Check | None = None) -> None:
    """Download and verify the files of `names` that are missing. One process of this node downloads; other processes
    wait for it.

    A file is trusted only after its hash has been compared. Until then its name is listed in `unverified_path`. So if a
    process dies during the download, later processes do not trust the files that it left.
    """
    if not snapshot.missing(names) and not snapshot.unverified_path.exists():
        return
    model, missing = snapshot.model, snapshot.missing(names)
    if constants.HF_HUB_OFFLINE and missing:
        raise not_cached_error(model, missing)
    with explain_failures(model):
        snapshot.unverified_path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(snapshot.unverified_path.with_suffix(".lock")):
            if missing := snapshot.missing(names):
                _download(snapshot, missing, check)
            _verify(snapshot)


def _download(snapshot: Snapshot, missing: list[str], check: Check | None) -> None:
    """Download files into the cache. Their names are listed in `unverified_path` before the first byte arrives."""
    model, files = snapshot.model, snapshot.files or {}
    size = sum(files[name].size for name in missing)
    disk = next(folder for folder in snapshot.folder.parents if folder.exists())
    if (free := shutil.disk_usage(disk).free) < size:
        raise disk_full_error(model, size, free, disk)
    already_unverified = _unverified_names(snapshot)
    snapshot.unverified_path.write_text(json.dumps(sorted({*already_unverified, *missing})), encoding="utf-8")
    log_values = (model.display_name, len(missing), size / 1e9, str(snapshot.folder))
    logger.info("downloading %s: %d files, %.2f GB, to %s", *log_values)
    started_at = time.monotonic()
    run_with_progress(
        model.display_name,
        lambda bar: snapshot_download(model.name, revision=model.commit, allow_patterns=missing, tqdm_class=bar),
        check,
    )
    logger.info("downloaded %s in %.1f s", model.display_name, time.monotonic() - started_at)


def _verify(snapshot: Snapshot) -> None:
    """Compare the hashes of unverified files with the hub's, and remove files that differ.

    Raises:
        ConfigError: some files differ; the message names them.
    """
    repo_files = snapshot.files or {}
    names = [name for name in _unverified_names(snapshot) if name in repo_files and not snapshot.missing([name])]
    with ThreadPoolExecutor() as threads:
        hashes = list(threads.map(lambda name: _hash_file(snapshot.folder / name, repo_files[name]), names))
    mismatches = {}
    for name, actual in zip(names, hashes, strict=True):
        if actual != (expected := _expected_hash(repo_files[name])):
            mismatches[name] = actual, expected
            blob = (snapshot.folder / name).resolve()
            (snapshot.folder / name).unlink()
            blob.unlink(missing_ok=True)
    snapshot.unverified_path.unlink(missing_ok=True)
    if mismatches:
        raise damaged_error(snapshot.model, mismatches)


def _unverified_names(snapshot: Snapshot) -> list[str]:
    """Return the names of unverified files. If the list is damaged, as on a full disk, all files count as
    unverified.
    """
    try:
        return list(json.loads(snapshot.unverified_path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    except ValueError:
        return list(snapshot.files or ())


def _expected_hash(file: RepoFile) -> str:
    """Return the hash that the hub lists: SHA-256 of a large (LFS) file, git's SHA-1 of any other."""
    return file.lfs.sha256 if file.lfs is not None else file.blob_id


def _hash_file(path: Path, file: RepoFile) -> str:
    """Return the hash of a file, of the same kind as `_expected_hash`."""
    hasher = hashlib.sha256() if file.lfs is not None else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as data:
        return hashlib.file_digest(data, lambda: hasher).hexdigest()
