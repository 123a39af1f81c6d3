"""The web page at `/`. Its files hold no data: the page fetches all data from the REST routes, with the user's API key.

The files are `index.html`, its style, its icon and its scripts (plain JavaScript modules, no build step). The headers
make the browser refuse scripts from elsewhere, and connections to other servers.
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
    """Add a route for each file of the page, at its path in `PAGE`."""
    for path in PAGE:
        app.add_api_route(path, _file(HERE / (path.rpartition("/")[2] or "index.html")), include_in_schema=False)


class SlashBehindPrefix:
    """ASGI middleware that redirects the application's prefix without a slash (`/llm/one`) to the page at `/llm/one/`.

    The page names its files by relative paths. The redirect is relative too, since a proxy in front may add a prefix.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Redirect the request, or pass it on."""
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
