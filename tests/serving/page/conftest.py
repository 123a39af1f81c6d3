"""A server of the demo pair, with API keys, two ranks and draft trees; and a Chromium that opens its page."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray  # noqa: F401  # after this import, Ray's own copy of psutil can be imported

from cluster.api.launch.keys import create
from tests.serving.actors.test_serve_command import aerie_serve, free_port, wait_for
from tests.serving.page.browser import CHROMIUM, Page, browser


@dataclass(frozen=True)
class Server:
    """The URL of a running server, an API key for requests, and an API key of an admin."""

    url: str
    use_key: str
    admin_key: str

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", headers={"x-api-key": self.admin_key}, timeout=20).json()

    def metrics_page(self) -> str:
        return httpx.get(f"{self.url}/metrics", headers={"x-api-key": self.admin_key}, timeout=20).text

    def complete(self, **body: Any) -> Any:
        """The response of /v1/completions as JSON, asked over HTTP and not through the page."""
        headers = {"x-api-key": self.use_key}
        response = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    keys = folder / "keys"
    started_server = Server(f"http://127.0.0.1:{port}", create(keys, "ann", "use"), create(keys, "root", "admin"))
    # With adaptive trees, measured times would decide how many nodes the playground shows.
    trees = "speculative_mode=fixed", "speculative_eagle_topk=4", "speculative_num_steps=4"
    settings = (f"http_port={port}", f"api_keys_file={keys}", *trees)
    with aerie_serve(*settings, log=Path(folder) / "log", RAY_USAGE_STATS_ENABLED="0") as process:
        wait_for(process, "READY ")
        yield started_server
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
    """The server's page in a fresh tab, signed in with the admin's key. After the test, the tab must have no errors."""
    tab.set_viewport()
    tab.open(f"{server.url}/")
    tab.wait("document.querySelector('#health').textContent !== 'asking the server'")
    tab.get(f"sessionStorage.setItem('aerie-key', '{server.admin_key}')")
    tab.open("about:blank#left")
    tab.errors.clear()
    tab.open(f"{server.url}/")
    tab.wait("document.querySelector('#health').textContent === 'serving'", 60)
    yield tab
    assert tab.errors == []
