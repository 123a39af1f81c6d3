"""A server on this machine that speaks the protocol of a hub, as far as `huggingface_hub` uses it for models.

The list of files, refs, and `resolve` with its headers (X-Repo-Commit, X-Linked-Size, X-Linked-Etag, ETag); large files
are redirected to another path, as to a CDN, and served in ranges. What went over the wire is in `log`.
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
class Sent:
    """One answer: to which request, and how many bytes of a file it carried."""

    method: str
    path: str
    range: str
    status: int
    bytes: int = 0


@dataclass
class Repository:
    """A model: by revision, the folder of its files. `gated` asks for `TOKEN`."""

    revisions: dict[str, Path]
    gated: bool = False
    damaged: set[str] = field(default_factory=set)  # served with a byte changed
    short: set[str] = field(default_factory=set)  # said to be a byte longer than they are
    cut: dict[str, int] = field(default_factory=dict)  # the connection of a download ends, once, after so many bytes

    def at(self, revision: str) -> tuple[str, Path] | None:
        """The commit and the folder of a revision, given by its name or its commit."""
        for name, folder in self.revisions.items():
            if revision in (name, commit_of(name)):
                return commit_of(name), folder
        return None


class FakeHub:
    """The repositories by name, and the log of the answers."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.log: list[Sent] = []
        self.url = self.cdn = ""

    def add(self, name: str, folder: str | Path, **more: Any) -> Repository:
        """Serve a folder as the branch main of a model."""
        self.repositories[name] = Repository({"main": Path(folder)}, **more)
        return self.repositories[name]

    def downloads(self, ending: str = "") -> list[Sent]:
        """The answers that carried bytes of files whose names end so."""
        return [sent for sent in self.log if sent.method == "GET" and sent.bytes and sent.path.endswith(ending)]


def hash_of(content: bytes, large: bool) -> str:
    return (
        hashlib.sha256(content).hexdigest()
        if large
        else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *given: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)/(refs|revision/.+|tree/.+)", path):
            self.api(found[1], found[2])
        elif found := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)", path):
            self.api(found[1], "revision/main")
        elif found := re.fullmatch(r"/(cdn/)?([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", path):
            self.file(found[2], found[3], found[4], on_cdn=bool(found[1]))
        else:
            self.fail(404, "RepoNotFound")

    def api(self, name: str, what: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.fail(401, "RepoNotFound")
        if what == "refs":
            refs = [
                {"name": each, "ref": f"refs/heads/{each}", "targetCommit": commit_of(each)}
                for each in repository.revisions
            ]
            return self.json({"branches": refs, "tags": [], "converts": []})
        kind, _, revision = what.partition("/")
        at = repository.at(revision.replace("%2F", "/"))
        if at is None:
            return self.fail(404, "RevisionNotFound")
        commit, folder = at
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
        at = None if repository is None else repository.at(revision)
        if repository is None or at is None or not (at[1] / file).is_file():
            return self.fail(404, "EntryNotFound")
        if repository.gated and not on_cdn and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.fail(403 if "Authorization" in self.headers else 401, "GatedRepo")
        content, large = (at[1] / file).read_bytes(), file.endswith(LARGE)
        headers = {"X-Repo-Commit": at[0], "ETag": f'"{hash_of(content, large)}"', "Accept-Ranges": "bytes"}
        if large and not on_cdn:
            size = len(content) + (file in repository.short)
            headers |= {
                "X-Linked-Size": str(size),
                "X-Linked-ETag": headers["ETag"],
                "Location": f"{self.hub.cdn}/cdn{self.path}",
            }
            return self.send(302, headers, b"")
        if file in repository.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        status = 200
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(given[1]), min(len(content), int(given[2] or len(content)) + 1)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        cut = repository.cut.pop(file, None) if self.command == "GET" else None
        return self.send(status, headers, content, cut)

    def json(self, value: object) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def fail(self, status: int, code: str) -> None:
        self.send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")

    def send(self, status: int, headers: dict[str, str], content: bytes, cut: int | None = None) -> None:
        """Send an answer; with `cut`, end the connection after so many bytes of its content."""
        sent = Sent(self.command, self.path.partition("?")[0], self.headers.get("Range", ""), status)
        self.hub.log.append(sent)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        content = content if cut is None else content[:cut]
        self.wfile.write(content)
        sent.bytes = len(content)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def fake_hub(port: int = 0) -> Iterator[FakeHub]:
    """A hub without models on a port of this machine, until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Own", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.cdn = f"http://localhost:{server.server_port}"  # another host to the library, which gets no token
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
