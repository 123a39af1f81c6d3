"""A headless Chromium, driven by its DevTools protocol: a test opens a page, clicks and types in it, and reads it."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_OPTIONS = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-default-apps", "--no-proxy-server", "--remote-debugging-port=0", "--hide-scrollbars"),
)
DEVTOOLS_URL_PREFIX = "DevTools listening on "
KEY_CODES = {"Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


class Page:
    """One tab. `errors` holds the exceptions of its scripts and the errors that the browser logged."""

    def __init__(self, websocket: ClientConnection, session: str) -> None:
        self._websocket, self._session, self._last_id = websocket, session, 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and return its result. Errors in events that arrive before the result go to `errors`."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params, "sessionId": self._session}
        self._websocket.send(json.dumps(message))
        while True:
            reply = json.loads(self._websocket.recv(timeout=30))
            if reply.get("id") == self._last_id:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self._record_error(reply)

    def _record_error(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def get(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self._value(expression)
        assert result.get("subtype") != "error", (expression, result)
        return result.get("value")

    def _value(self, expression: str) -> dict[str, Any]:
        result: dict[str, Any] = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        raised = {"subtype": "error", "thrown": result.get("exceptionDetails")}
        return raised if "exceptionDetails" in result else result["result"]

    def wait(self, expression: str, within_s: float = 20.0) -> Any:
        """Wait until a JavaScript expression is true, and return its value.

        An expression that raises counts as false, because elements may not exist while a page loads.
        """
        deadline = time.monotonic() + within_s
        while not (value := self._value(expression).get("value")):
            assert time.monotonic() < deadline, f"{expression} stayed false: {self.get('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        content: str = self.get(f"document.querySelector({json.dumps(selector)}).textContent")
        return content

    def texts(self, selector: str) -> list[str]:
        contents: list[str] = self.get(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)"
        )
        return contents

    def click(self, selector: str) -> None:
        """Click the middle of an element; if its text has several lines, the middle of the first line."""
        position = self.get(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const box = node.getClientRects()[0];"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=position[0], y=position[1], button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Replace the content of an input field by typing a text."""
        self.get(f"(() => {{ const n = document.querySelector({json.dumps(selector)}); n.focus(); n.select(); }})()")
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Select an option of a `select` element by its value."""
        self.get(
            f"(() => {{ const n = document.querySelector({json.dumps(selector)}); n.value = {json.dumps(value)};"
            "n.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def press(self, key: str) -> None:
        text_param = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=KEY_CODES[key],
                **text_param,
            )

    def set_viewport(self, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Set the size of the viewport, and the light or the dark colour scheme."""
        is_mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_mobile
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def save_screenshot(self, file: Path, full_page: bool = True) -> None:
        screenshot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)
        file.write_bytes(base64.b64decode(screenshot["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """Start a Chromium with one tab, yield the tab, and end the Chromium."""
    assert CHROMIUM is not None, "there is no Chromium here; tests that need it must skip"
    root_options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="aerie-chromium-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *CHROMIUM_OPTIONS, *root_options, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith(DEVTOOLS_URL_PREFIX))
            with connect(line.removeprefix(DEVTOOLS_URL_PREFIX).strip(), max_size=None, compression=None) as websocket:
                yield Page(websocket, _open_tab(websocket))
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _open_tab(websocket: ClientConnection) -> str:
    """Open a new tab and return its DevTools session id."""

    def send_command(number: int, method: str, **params: Any) -> Any:
        websocket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (reply := json.loads(websocket.recv(timeout=30))).get("id") != number:
            pass
        return reply["result"]

    target = send_command(-1, "Target.createTarget", url="about:blank")["targetId"]
    session: str = send_command(-2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    return session
