"""A headless Chromium, driven by its DevTools protocol: a page that is opened, clicked, typed into and looked at."""

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
QUIET = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-default-apps", "--no-proxy-server", "--remote-debugging-port=0", "--hide-scrollbars"),
)
LINE = "DevTools listening on "
KEYS = {"Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


class Page:
    """One tab. `troubles` are the exceptions of its scripts and what the browser logged as an error."""

    def __init__(self, wire: ClientConnection, session: str) -> None:
        self._wire, self._session, self._number = wire, session, 0
        self.troubles: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """What the browser answers; events that come before are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, "sessionId": self._session}
        self._wire.send(json.dumps(message))
        while True:
            said = json.loads(self._wire.recv(timeout=30))
            if said.get("id") == self._number:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            self._note(said)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.troubles.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.troubles.append(str(params["args"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def get(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self._value(expression)
        assert result.get("subtype") != "error", (expression, result)
        return result.get("value")

    def _value(self, expression: str) -> dict[str, Any]:
        result: dict[str, Any] = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        thrown = {"subtype": "error", "thrown": result.get("exceptionDetails")}
        return thrown if "exceptionDetails" in result else result["result"]

    def wait(self, expression: str, within_s: float = 20.0) -> Any:
        """The value of an expression, once it is true; while a page is loaded, elements may not be there yet."""
        until = time.monotonic() + within_s
        while not (value := self._value(expression).get("value")):
            assert time.monotonic() < until, f"{expression} did not come: {self.get('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        found: str = self.get(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.get(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)")
        return found

    def click(self, selector: str) -> None:
        """Press the mouse where the middle of the first line of an element is."""
        at = self.get(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const box = node.getClientRects()[0];"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Type a text over what is in a field."""
        self.get(f"(() => {{ const n = document.querySelector({json.dumps(selector)}); n.focus(); n.select(); }})()")
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Pick a value of a select."""
        self.get(
            f"(() => {{ const n = document.querySelector({json.dumps(selector)}); n.value = {json.dumps(value)};"
            "n.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def press(self, key: str) -> None:
        typed = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **typed)

    def look(self, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show the page at a size, in light or in dark."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """One tab of a Chromium of its own, which is ended afterwards."""
    assert CHROMIUM is not None, "tests that use it skip where there is none"
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="aerie-chromium-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *QUIET, *root, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if line.startswith(LINE))
            with connect(line.removeprefix(LINE).strip(), max_size=None, compression=None) as wire:
                yield Page(wire, _attached(wire))
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _attached(wire: ClientConnection) -> str:
    """The session of a new tab."""

    def ask(number: int, method: str, **params: Any) -> Any:
        wire.send(json.dumps({"id": number, "method": method, "params": params}))
        while (said := json.loads(wire.recv(timeout=30))).get("id") != number:
            pass
        return said["result"]

    target = ask(-1, "Target.createTarget", url="about:blank")["targetId"]
    session: str = ask(-2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    return session
