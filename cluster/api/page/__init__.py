"""The page at `/`: files that hold no data. What it shows it asks the REST routes for, with the key that is typed in.

`index.html` with its style, its icon and its scripts, plain modules that browsers load as they are. Nothing comes from
elsewhere, and the headers say so to the browser: no script but these, no address but this server's.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.core.api_keys import PAGE

HERE = Path(__file__).parent
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the files of the page, each at its path of `PAGE`."""
    for path in PAGE:
        app.add_api_route(path, _file(HERE / (path.rpartition("/")[2] or "index.html")), include_in_schema=False)


class SlashBehindPrefix:
    """ASGI middleware that sends a request for the application's prefix (`/llm/one`) on to the page at `/llm/one/`.

    The page names its files relative to its address. So does the redirect, since a proxy may have other prefixes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        prefix = scope.get("root_path", "").rstrip("/")
        if scope["type"] != "http" or not prefix or scope["path"] != prefix:
            await self._app(scope, receive, send)
            return
        query = "?" + scope["query_string"].decode("latin-1") if scope["query_string"] else ""
        there = f"./{quote(prefix.rpartition('/')[2])}/{query}"
        await Response(status_code=307, headers={"Location": there})(scope, receive, send)


def _file(file: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = file.read_bytes(), f"{TYPES[file.suffix]}; charset=utf-8"

    async def answer() -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": kind})

    return answer
