"""A download that reports its progress on a terminal and in the log, and ends soon after an interrupt."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from huggingface_hub.utils import tqdm

logger = logging.getLogger(__name__)

Check = Callable[[], None]
CHECK_PERIOD_S = 0.2
THREAD_NAME = "aerie-download"
LOG_PERIOD_S = 30.0
BYTES_BAR = "huggingface_hub.snapshot_download"  # the library's name for the progress bar that counts bytes written


def run_with_progress(name: str, download: Callable[[type[tqdm]], object], check: Check | None = None) -> None:
    """Run `download` with a class of progress bars. A bar is drawn on a terminal only. The bar that counts bytes also
    logs the progress every `LOG_PERIOD_S` seconds, with or without a terminal.

    The library itself reacts to an interrupt only when each of its threads has finished its file. So the download runs
    in a separate thread; after an interrupt, the next piece of data that arrives ends the download. If `check` is
    given, it is called every `CHECK_PERIOD_S` seconds during the download, and may raise to interrupt the download.
    """
    interrupted = threading.Event()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes, self._bytes = kwargs.get("name") == BYTES_BAR, 0.0
            self._logged_at = time.monotonic()
            kwargs.setdefault("disable", None)  # draw only on a terminal
            kwargs["leave"] = False  # erase the bar at the end
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if interrupted.is_set():
                raise RuntimeError("interrupted")
            self._bytes += n or 0
            if self._counts_bytes and (now := time.monotonic()) - self._logged_at > LOG_PERIOD_S:
                self._logged_at = now
                logger.info("downloading %s: %.2f of %.2f GB", name, self._bytes / 1e9, (self.total or 0) / 1e9)
            drawn: bool | None = super().update(n)
            return drawn

    own_thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
    try:
        download_future = own_thread.submit(download, Bar)
        while check is not None and wait([download_future], CHECK_PERIOD_S).not_done:
            check()
        download_future.result()
    except BaseException:
        interrupted.set()
        raise
    finally:
        own_thread.shutdown()
