"""The page at `/`: files that hold no data. What it shows it asks the REST routes for, with the key that is typed in.

`index.html` with its style, its icon and its scripts, plain modules that browsers load as they are. Nothing comes from
elsewhere, and the headers say so to the browser: no script but these, no address but this server's.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from cluster.api.keys import PAGE

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


def _file(file: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = file.read_bytes(), f"{TYPES[file.suffix]}; charset=utf-8"

    async def answer() -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": kind})

    return answer
