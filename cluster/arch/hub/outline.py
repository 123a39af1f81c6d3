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
from cluster.arch.hub.refusals import explain_failures, not_cached_error
from cluster.arch.hub.snapshot import Snapshot, fetch_config_files, is_complete, mirror, weight_names
from cluster.arch.safetensors.header import MAX_HEADER_BYTES, read_header
from cluster.arch.safetensors.stored import normalise_name
from cluster.config import ConfigError

FIRST_REQUEST_BYTES = 64 << 10  # bytes of the first request; most headers are smaller
COPIED_TENSORS = ("d2t",)  # tensors whose data is also fetched: d2t maps a draft's vocabulary to the target's
MAX_TENSOR_BYTES = 64 << 20  # a larger tensor is not fetched; no vocabulary needs as much
MAX_CONNECTIONS = 8
RETRIES = 2  # after 1 and 2 seconds


@contextmanager
def header_folder(model: HubModel) -> Iterator[str]:
    """A context manager: yields a folder with a model's configs and headers. The folder exists while the block runs.

    If the snapshot in the cache is complete, its folder is yielded. Otherwise a temporary folder is yielded: its weight
    files have their true size and header but no data, except a draft's `d2t`. A ConfigError raised in the block then
    names the model instead of the temporary folder.

    Raises:
        ConfigError: the files cannot be fetched.
    """
    snapshot = fetch_config_files(model)
    if is_complete(snapshot):
        yield str(snapshot.folder)
        return
    names = weight_names(snapshot)
    if constants.HF_HUB_OFFLINE and (missing := snapshot.missing(names)):
        raise not_cached_error(snapshot.model, missing)
    with tempfile.TemporaryDirectory(prefix="aerie-headers-") as folder:
        with explain_failures(snapshot.model), ThreadPoolExecutor(MAX_CONNECTIONS) as threads:
            mirror(snapshot, Path(folder), sized=True)
            list(threads.map(lambda name: _write_header(snapshot, name, Path(folder) / name), names))
        try:
            yield folder
        except ConfigError as error:
            raise ConfigError(str(error).replace(folder, snapshot.model.display_name)) from None


def _write_header(snapshot: Snapshot, name: str, path: Path) -> None:
    """Copy the header of a remote safetensors file, and the data of the tensors `COPIED_TENSORS`, into the file `path`:
    a sparse file of the same size. The data of these tensors is copied because it is checked before any weights are
    loaded.

    This function checks the header's length only to limit the download; `read_header` checks everything else.
    """
    assert snapshot.files is not None, "a snapshot without a list of files has no names of weights"
    size = snapshot.files[name].size
    url = hf_hub_url(snapshot.model.name, name, revision=snapshot.model.commit)
    head = _read_range(url, 0, min(size, FIRST_REQUEST_BYTES)) if size else b""
    length = int.from_bytes(head[:8], "little")
    if FIRST_REQUEST_BYTES - 8 < length <= min(size - 8, MAX_HEADER_BYTES):
        head += _read_range(url, len(head), 8 + length)
    path.write_bytes(head[: 8 + length])
    os.truncate(path, size)
    try:
        tensors = read_header(path)
    except ConfigError:
        return  # code that reads the folder will report the same error
    for name, location in tensors.items():
        if normalise_name(name) in COPIED_TENSORS and location.stop - location.start <= MAX_TENSOR_BYTES:
            with path.open("r+b") as file:
                file.seek(location.start)
                file.write(_read_range(url, location.start, location.stop))


def _read_range(url: str, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop - 1` of a remote file. Stop reading after these bytes, even if the server sends
    more.

    Raises:
        OSError: the server does not send these bytes.
    """
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    received = b""
    with http_stream_backoff(
        "GET", url, headers=headers, timeout=timeout, follow_redirects=True, max_retries=RETRIES
    ) as response:
        hf_raise_for_status(response)
        if start and response.status_code != 206:
            raise OSError(
                f"{url} is not served in parts: a request for a range is answered with {response.status_code}"
            )
        for chunk in response.iter_bytes():
            received += chunk
            if len(received) >= stop - start:
                break
    if len(received) < stop - start:
        raise OSError(f"{url} ended after {start + len(received)} bytes, and {stop} were asked for")
    return received[: stop - start]
