"""The web page at `/`. Its files hold no data: the page fetches all data from the REST routes, with the user's API key.

The files are `index.html`, its style, its icon and its scripts (plain JavaScript modules, no build step). The headers
in `HEADERS` make the browser refuse scripts from elsewhere, and connections to other servers.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from cluster.api.core.api_keys import PAGE_PATHS

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
    """Add a route for each file of the page, at its path in `PAGE_PATHS`."""
    for path in PAGE_PATHS:
        app.add_api_route(path, _file(HERE / (path.rpartition("/")[2] or "index.html")), include_in_schema=False)


def _file(file: Path) -> Callable[[], Awaitable[Response]]:
    content, content_type = file.read_bytes(), f"{TYPES[file.suffix]}; charset=utf-8"

    async def answer() -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": content_type})

    return answer
