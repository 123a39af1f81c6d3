"""A server of the demo pair, with keys, on two ranks and with trees; and a Chromium that looks at it."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray  # noqa: F401  # its own copy of psutil can be imported after it

from cluster.api.launch.keys import create
from tests.actors.test_serve_command import aerie_serve, free_port, wait_for
from tests.page.browser import CHROMIUM, Page, browser


@dataclass(frozen=True)
class Server:
    """Where it listens, and its keys."""

    url: str
    use: str
    admin: str

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", headers={"x-api-key": self.admin}, timeout=20).json()

    def page_of_metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", headers={"x-api-key": self.admin}, timeout=20).text

    def complete(self, **body: Any) -> Any:
        """The whole answer of /v1/completions, without a page."""
        headers = {"x-api-key": self.use}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    keys = folder / "keys"
    own = Server(f"http://127.0.0.1:{port}", create(keys, "ann", "use"), create(keys, "root", "admin"))
    settings = (f"http_port={port}", f"api_keys_file={keys}", "speculative_eagle_topk=4", "speculative_num_steps=4")
    with aerie_serve(*settings, log=Path(folder) / "log", RAY_USAGE_STATS_ENABLED="0") as process:
        wait_for(process, "READY ")
        yield own
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


@pytest.fixture(scope="package")
def tab() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    with browser() as page:
        yield page


@pytest.fixture
def page(tab: Page, server: Server) -> Iterator[Page]:
    """The page in an empty tab, let in with an admin's key. Its scripts have no errors, whatever a test does."""
    tab.look()
    tab.open(f"{server.url}/")
    tab.wait("document.querySelector('#health').textContent !== 'asking the server'")
    tab.get(f"sessionStorage.setItem('aerie-key', '{server.admin}')")
    tab.open("about:blank#left")
    tab.troubles.clear()
    tab.open(f"{server.url}/")
    tab.wait("document.querySelector('#health').textContent === 'serving'", 60)
    yield tab
    assert tab.troubles == []
