"""The files of one commit of a model in this node's cache: which files are used, how they are downloaded and verified.

A model's files are its weights and its description: configs, tokenizer and chat template (`DESCRIPTION`).
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
from cluster.arch.hub.progress import Check, watched
from cluster.arch.hub.refusals import damaged, explained, no_room, not_cached
from cluster.arch.safetensors.stored import weight_files
from cluster.config import ConfigError

logger = logging.getLogger(__name__)

DESCRIPTION = (
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
CONFIGS = ("config.json", "params.json")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The folder in the cache that holds, or will hold, the files of a commit.

    `listed` maps the names of the files at the top level of the repository to their sizes and hashes. If neither the
    cache nor the hub has this list, `listed` is None, and the folder is used as it is.
    """

    model: HubModel
    folder: Path
    listed: Mapping[str, RepoFile] | None

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Return the entries of `names` that are not in the folder."""
        return [name for name in names if not (self.folder / name).exists()]

    @property
    def unverified(self) -> Path:
        """The path of a file that lists downloads whose hashes are not compared yet. It lies beside the library's
        locks.
        """
        repository = self.folder.parents[1]
        return repository.parent / ".locks" / repository.name / f"aerie-{self.model.commit}.json"


def resolved(model: HubModel) -> HubModel:
    """Return the model with the commit that its revision names now. If the hub is unreachable, the cache decides.

    Raises:
        ConfigError: the model or revision does not exist, or neither the hub nor the cache knows the commit.
    """
    if model.commit:
        return model
    with explained(model):
        return replace(model, commit=HfApi().resolve_revision(model.name, revision=model.revision).resolved)


def described(model: HubModel) -> Snapshot:
    """Return the snapshot of a model, after its description has been downloaded into its folder.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    model = resolved(model)
    repository = Path(constants.HF_HUB_CACHE).expanduser().resolve() / f"models--{model.name.replace('/', '--')}"
    folder = repository / "snapshots" / model.commit
    with explained(model):
        listed = _listed(model, folder)
    snapshot = Snapshot(model, folder, listed)
    if listed is not None:
        _bring(snapshot, [name for name in DESCRIPTION if name in listed])
    return snapshot


def whole(model: HubModel, check: Check | None = None) -> Snapshot:
    """Return the snapshot of a model, after all files, weights included, have been downloaded into its folder. `check`
    is called regularly during the download, and may raise to end it.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    snapshot = described(model)
    _bring(snapshot, weights_of(snapshot), check)
    return snapshot


def is_whole(snapshot: Snapshot) -> bool:
    """Whether the folder holds all weights, and all downloads have been verified."""
    if snapshot.listed is None:
        return True
    names = weights_of(snapshot)
    return bool(names) and not snapshot.lacks(names) and not snapshot.unverified.exists()


def weights_of(snapshot: Snapshot) -> list[str]:
    """Return the names of the weight files, as `weight_files` would choose them in a folder with all listed files.
    Empty if `listed` is None.
    """
    if snapshot.listed is None:
        return []
    with tempfile.TemporaryDirectory(prefix="aerie-names-") as stand_in:
        mirror(snapshot, Path(stand_in), sized=False)
        try:
            files, _ = weight_files(stand_in)
        except ConfigError as error:
            raise ConfigError(str(error).replace(stand_in, snapshot.model.shown)) from None
        return [path.name for path in files if path.name in snapshot.listed]


def mirror(snapshot: Snapshot, into: Path, *, sized: bool) -> None:
    """Fill the empty folder `into` with one entry per listed file.

    A file of the description that is in the cache becomes a link. Any other file becomes a file without data: a sparse
    file of the true size if `sized`, otherwise an empty file.

    Raises:
        OSError: the disk cannot hold a sparse file of that size.
    """
    for name, file in (snapshot.listed or {}).items():
        if name in DESCRIPTION and (snapshot.folder / name).exists():
            (into / name).symlink_to(snapshot.folder / name)
        else:
            (into / name).touch()
            os.truncate(into / name, file.size if sized else 0)


def _listed(model: HubModel, folder: Path) -> dict[str, RepoFile] | None:
    """Return the list of files at the top level of the repository, from the cache or, if missing there, from the hub.

    Return None if neither has the list, but configs of the commit are in the cache: put there by hand, or by an older
    version of the library.
    """
    try:
        files = get_cached_repo_tree(model.name, revision=model.commit)
    except CachedRepoTreeNotFoundError:
        here = any((folder / name).exists() for name in CONFIGS)
        if constants.HF_HUB_OFFLINE and here:
            return None
        if constants.HF_HUB_OFFLINE:
            raise not_cached(model, []) from None
        try:
            tree = HfApi().list_repo_tree(model.name, revision=model.commit)
            files = [file for file in tree if isinstance(file, RepoFile)]
        except Exception as error:
            if not here:
                raise
            logger.warning("%s is served from %s as it is, since the hub gave no list: %s", model.shown, folder, error)
            return None
    return {file.path: file for file in files if "/" not in file.path}


def _bring(snapshot: Snapshot, names: Sequence[str], check: Check | None = None) -> None:
    """Download and verify missing `names`. One process of this node downloads; other processes wait for it.

    A file is trusted only after its hash was compared. Until then its name is listed in `unverified`. So if a process
    dies during the download, later processes do not trust its files.
    """
    if not snapshot.lacks(names) and not snapshot.unverified.exists():
        return
    model, missing = snapshot.model, snapshot.lacks(names)
    if constants.HF_HUB_OFFLINE and missing:
        raise not_cached(model, missing)
    with explained(model):
        snapshot.unverified.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(snapshot.unverified.with_suffix(".lock")):
            if missing := snapshot.lacks(names):
                _download(snapshot, missing, check)
            _verify(snapshot)


def _download(snapshot: Snapshot, missing: list[str], check: Check | None) -> None:
    """Download files into the cache. Their names are listed in `unverified` before the first byte arrives."""
    model, files = snapshot.model, snapshot.listed or {}
    size = sum(files[name].size for name in missing)
    disk = next(folder for folder in snapshot.folder.parents if folder.exists())
    if (free := shutil.disk_usage(disk).free) < size:
        raise no_room(model, size, free, disk)
    before = _names_unverified(snapshot)
    snapshot.unverified.write_text(json.dumps(sorted({*before, *missing})), encoding="utf-8")
    where = (model.shown, len(missing), size / 1e9, str(snapshot.folder))
    logger.info("downloading %s: %d files, %.2f GB, to %s", *where)
    began = time.monotonic()
    watched(
        model.shown,
        lambda bar: snapshot_download(model.name, revision=model.commit, allow_patterns=missing, tqdm_class=bar),
        check,
    )
    logger.info("downloaded %s in %.1f s", model.shown, time.monotonic() - began)


def _verify(snapshot: Snapshot) -> None:
    """Compare the hashes of unverified files with the hub's, and remove files that differ.

    Raises:
        ConfigError: some files differ; the message names them.
    """
    listed = snapshot.listed or {}
    names = [name for name in _names_unverified(snapshot) if name in listed and not snapshot.lacks([name])]
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(lambda name: _hash(snapshot.folder / name, listed[name]), names))
    wrong = {}
    for name, given in zip(names, found, strict=True):
        if given != (expected := _expected(listed[name])):
            wrong[name] = given, expected
            blob = (snapshot.folder / name).resolve()
            (snapshot.folder / name).unlink()
            blob.unlink(missing_ok=True)
    snapshot.unverified.unlink(missing_ok=True)
    if wrong:
        raise damaged(snapshot.model, wrong)


def _names_unverified(snapshot: Snapshot) -> list[str]:
    """Return the names of unverified files. If the list is damaged, as on a full disk, all files count as
    unverified.
    """
    try:
        return list(json.loads(snapshot.unverified.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    except ValueError:
        return list(snapshot.listed or ())


def _expected(file: RepoFile) -> str:
    """Return the hash that the hub lists: SHA-256 of a large (LFS) file, git's SHA-1 of any other."""
    return file.lfs.sha256 if file.lfs is not None else file.blob_id


def _hash(path: Path, file: RepoFile) -> str:
    """Return the hash of a file, of the same kind as `_expected`."""
    own = hashlib.sha256() if file.lfs is not None else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as data:
        return hashlib.file_digest(data, lambda: own).hexdigest()
