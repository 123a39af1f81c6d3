"""A local HTTP server that stands in for the Hugging Face Hub, as far as `huggingface_hub` downloads models from it.

It serves the list of files, the refs, and `resolve` with its headers (X-Repo-Commit, X-Linked-Size, X-Linked-Etag,
ETag). Requests for large files are redirected to another path, which stands in for a CDN and serves ranges. `log`
records every response.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LARGE = (".safetensors", ".bin", ".gguf", ".pt", "tokenizer.json")  # in git-lfs
TOKEN = "hf_good"


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class LoggedResponse:
    """One response: the request that it answers, its status, and how many bytes of a file were sent."""

    method: str
    path: str
    range: str
    status: int
    bytes: int = 0


@dataclass
class Repository:
    """A model repository: for each revision, the folder of its files. A `gated` repository requires `TOKEN`."""

    revisions: dict[str, Path]
    gated: bool = False
    damaged: set[str] = field(default_factory=set)  # files that are served with one byte changed
    overstated: set[str] = field(default_factory=set)  # files whose X-Linked-Size is one byte too large
    cut_after: dict[str, int] = field(default_factory=dict)  # file: bytes after which its next download is disconnected

    def resolve(self, revision: str) -> tuple[str, Path] | None:
        """Return the commit and the folder of a revision. `revision` is the name or the commit of the revision."""
        for name, folder in self.revisions.items():
            if revision in (name, commit_of(name)):
                return commit_of(name), folder
        return None


class FakeHub:
    """The state of the server: the repositories by name, and the log of the responses."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.log: list[LoggedResponse] = []
        self.url = self.cdn = ""

    def add(self, name: str, folder: str | Path, **options: Any) -> Repository:
        """Serve `folder` as the branch `main` of the model `name`."""
        self.repositories[name] = Repository({"main": Path(folder)}, **options)
        return self.repositories[name]

    def downloads(self, suffix: str = "") -> list[LoggedResponse]:
        """Return the GET responses with bytes of files whose names end with `suffix`."""
        return [
            response
            for response in self.log
            if response.method == "GET" and response.bytes and response.path.endswith(suffix)
        ]


def hash_of(content: bytes, large: bool) -> str:
    return (
        hashlib.sha256(content).hexdigest()
        if large
        else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        if path_match := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)/(refs|revision/.+|tree/.+)", path):
            self.api(path_match[1], path_match[2])
        elif path_match := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)", path):
            self.api(path_match[1], "revision/main")
        elif path_match := re.fullmatch(r"/(cdn/)?([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", path):
            self.file(path_match[2], path_match[3], path_match[4], on_cdn=bool(path_match[1]))
        else:
            self.fail(404, "RepoNotFound")

    def api(self, name: str, endpoint: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.fail(401, "RepoNotFound")
        if endpoint == "refs":
            refs = [
                {"name": each, "ref": f"refs/heads/{each}", "targetCommit": commit_of(each)}
                for each in repository.revisions
            ]
            return self.json({"branches": refs, "tags": [], "converts": []})
        kind, _, revision = endpoint.partition("/")
        resolved = repository.resolve(revision.replace("%2F", "/"))
        if resolved is None:
            return self.fail(404, "RevisionNotFound")
        commit, folder = resolved
        if kind == "revision":
            return self.json({"id": name, "sha": commit, "siblings": [], "private": False})
        files = []
        for each in sorted(folder.rglob("*")):
            if each.is_file():
                content, large = each.read_bytes(), each.name.endswith(LARGE)
                file: dict[str, Any] = {"type": "file", "path": str(each.relative_to(folder)), "size": len(content)}
                file["oid"] = hash_of(content, large=False)
                if large:
                    file["lfs"] = {"oid": hash_of(content, large=True), "size": len(content), "pointerSize": 130}
                files.append(file)
        return self.json(files)

    def file(self, name: str, revision: str, file: str, on_cdn: bool) -> None:
        repository = self.hub.repositories.get(name)
        resolved = None if repository is None else repository.resolve(revision)
        if repository is None or resolved is None or not (resolved[1] / file).is_file():
            return self.fail(404, "EntryNotFound")
        if repository.gated and not on_cdn and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.fail(403 if "Authorization" in self.headers else 401, "GatedRepo")
        content, large = (resolved[1] / file).read_bytes(), file.endswith(LARGE)
        headers = {"X-Repo-Commit": resolved[0], "ETag": f'"{hash_of(content, large)}"', "Accept-Ranges": "bytes"}
        if large and not on_cdn:
            size = len(content) + (file in repository.overstated)
            headers |= {
                "X-Linked-Size": str(size),
                "X-Linked-ETag": headers["ETag"],
                "Location": f"{self.hub.cdn}/cdn{self.path}",
            }
            return self.send(302, headers, b"")
        if file in repository.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        status = 200
        if range_match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(range_match[1]), min(len(content), int(range_match[2] or len(content)) + 1)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        cut_after = repository.cut_after.pop(file, None) if self.command == "GET" else None
        return self.send(status, headers, content, cut_after)

    def json(self, value: object) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def fail(self, status: int, code: str) -> None:
        self.send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")

    def send(self, status: int, headers: dict[str, str], content: bytes, cut_after: int | None = None) -> None:
        """Send a response. With `cut_after`, close the connection after that many bytes of the content."""
        logged = LoggedResponse(self.command, self.path.partition("?")[0], self.headers.get("Range", ""), status)
        self.hub.log.append(logged)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        content = content if cut_after is None else content[:cut_after]
        logged.bytes = len(content)  # before the client can have read them, and looks at the log
        self.wfile.write(content)
        if cut_after is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def fake_hub(port: int = 0) -> Iterator[FakeHub]:
    """Run a hub without models on a local port until the block ends. Port 0 chooses a free port."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Own", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"  # for the library another host: it sends no token
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
