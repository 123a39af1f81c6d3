"""A hub model as a folder without weights: its configs, and the headers of its weight files, read by range requests."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from cluster.arch.hub.names import HubModel
from cluster.arch.hub.refusals import explained, not_cached
from cluster.arch.hub.snapshot import Snapshot, described, is_whole, mirror, weights_of
from cluster.arch.safetensors.header import LONGEST, read_header
from cluster.arch.safetensors.stored import normal_name
from cluster.config import ConfigError

FIRST = 64 << 10  # bytes of the first request; most headers are smaller
READ = ("d2t",)  # tensors whose data is fetched too: d2t, the ids of a draft's vocabulary
LARGEST = 64 << 20  # maximum bytes of such a tensor, far beyond any vocabulary
CONNECTIONS = 8
RETRIES = 2  # after 1 and 2 seconds


@contextmanager
def outline(model: HubModel) -> Iterator[str]:
    """A context manager: yields a folder with a model's configs and headers. The folder exists while the block runs.

    If the snapshot in the cache is complete, its folder is yielded. Otherwise a temporary folder is yielded: its weight
    files have their true size and header but no data, except a draft's `d2t`. A ConfigError raised in the block then
    names the model instead of the temporary folder.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    snapshot = described(model)
    if is_whole(snapshot):
        yield str(snapshot.folder)
        return
    names = weights_of(snapshot)
    if constants.HF_HUB_OFFLINE and (missing := snapshot.lacks(names)):
        raise not_cached(snapshot.model, missing)
    with tempfile.TemporaryDirectory(prefix="aerie-headers-") as folder:
        with explained(snapshot.model), ThreadPoolExecutor(CONNECTIONS) as threads:
            mirror(snapshot, Path(folder), sized=True)
            list(threads.map(lambda name: _write_header(snapshot, name, Path(folder) / name), names))
        try:
            yield folder
        except ConfigError as error:
            raise ConfigError(str(error).replace(folder, snapshot.model.shown)) from None


def _write_header(snapshot: Snapshot, name: str, path: Path) -> None:
    """Copy the header of a remote safetensors file, and the data of the tensors `READ`, into the file `path`: a sparse
    file of the same size. That data is copied because it is checked before any weights are loaded.

    Here the header's length is checked only to limit the download; `read_header` checks everything else.
    """
    assert snapshot.listed is not None, "a snapshot without a list of files has no names of weights"
    size = snapshot.listed[name].size
    url = hf_hub_url(snapshot.model.name, name, revision=snapshot.model.commit)
    begin = _read(url, 0, min(size, FIRST)) if size else b""
    length = int.from_bytes(begin[:8], "little")
    if FIRST - 8 < length <= min(size - 8, LONGEST):
        begin += _read(url, len(begin), 8 + length)
    path.write_bytes(begin[: 8 + length])
    os.truncate(path, size)
    try:
        tensors = read_header(path)
    except ConfigError:
        return  # code that reads the folder will report the same error
    for name, stored in tensors.items():
        if normal_name(name) in READ and stored.stop - stored.start <= LARGEST:
            with path.open("r+b") as file:
                file.seek(stored.start)
                file.write(_read(url, stored.start, stored.stop))


def _read(url: str, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop - 1` of a remote file. Stop reading after that, even if the server sends more.

    Raises:
        OSError: the server does not send these bytes.
    """
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    got = b""
    with http_stream_backoff(
        "GET", url, headers=headers, timeout=timeout, follow_redirects=True, max_retries=RETRIES
    ) as answer:
        hf_raise_for_status(answer)
        if start and answer.status_code != 206:
            raise OSError(f"{url} is not served in parts: a request for a range is answered with {answer.status_code}")
        for piece in answer.iter_bytes():
            got += piece
            if len(got) >= stop - start:
                break
    if len(got) < stop - start:
        raise OSError(f"{url} ended after {start + len(got)} bytes, and {stop} were asked for")
    return got[: stop - start]
