"""A hub on loopback, for tests: the protocol of huggingface.co, run as a process of its own.

`python hub_server.py FOLDER` serves FOLDER/OWNER/NAME@REVISION/PATH and prints its two addresses as JSON. Files of the
hub are announced at the first address (ETag, X-Repo-Commit); large ones redirect to the second address, a content
network that refuses every request with an Authorization header. POST /_behave sets faults, GET /_seen tells requests,
GET /_stalled is answered once a file's bytes have stalled.
"""

import hashlib
import json
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

LARGE_SUFFIXES = (".safetensors", ".gguf", ".bin")
HTML = b"<html><body>Please log in to the network.</body></html>"


@dataclass
class Behaviour:
    """The faults of the server; by default none."""

    status: int = 0
    """The answer to every request of the first address."""
    reason: str = ""
    """The hub's X-Error-Message beside that status."""
    retry_after: str = ""
    file_status: dict[str, int] = field(default_factory=dict)
    """The answer to requests of a file, by its path."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """The connection breaks after so many bytes of a file, once for each number."""
    stalls: dict[str, int] = field(default_factory=dict)
    """So many bytes of a file are sent, and no more until the client leaves; once."""
    whole: list[str] = field(default_factory=list)
    """Files that are sent whole, with 200, although a range was asked for."""
    html: dict[str, int] = field(default_factory=dict)
    """A page is sent instead of a file, so many times."""
    changed: dict[str, int] = field(default_factory=dict)
    """Other bytes of the same length are sent, so many times."""
    gated: list[str] = field(default_factory=list)
    private: dict[str, str] = field(default_factory=dict)
    """Repositories that need a token, and the token."""
    listing: str = ""
    """The answer instead of a repository's listing."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that are told of files instead of the true ones."""


def commit_of(home: Path) -> str:
    """A commit that follows from the files of a revision and their contents."""
    digest = hashlib.sha1(home.name.encode(), usedforsecurity=False)
    for path in sorted(home.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(home)} {git_digest(path.read_bytes())}\n".encode())
    return digest.hexdigest()


class Hub:
    """The state that both addresses share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behaviour = Behaviour()
        self.seen: list[dict[str, Any]] = []
        self.cdn = ""
        self.lock = threading.Lock()
        self.stalled = threading.Event()

    def revisions(self, repo: str) -> dict[str, str]:
        """Branches and tags of a repository, with their commits."""
        owner, _, name = repo.rpartition("/")
        found = sorted((self.folder / owner).glob(f"{name}@*"))
        return {path.name.partition("@")[2].replace("%2F", "/"): commit_of(path) for path in found}

    def revision(self, repo: str, asked: str) -> str | None:
        """The branch or tag that is meant by its name or its commit."""
        known = self.revisions(repo)
        return asked if asked in known else next((name for name, commit in known.items() if commit == asked), None)

    def home(self, repo: str, revision: str) -> Path:
        return self.folder / f"{repo}@{revision.replace('/', '%2F')}"

    def files(self, repo: str, revision: str) -> dict[str, Path]:
        home = self.home(repo, revision)
        return {path.relative_to(home).as_posix(): path for path in sorted(home.rglob("*")) if path.is_file()}

    def spend(self, counts: dict[str, Any], name: str) -> Any:
        """The value of a fault for a file, for the last time; None where there is none."""
        with self.lock:
            value = counts.get(name)
            if isinstance(value, list):
                return value.pop(0) if value else None
            if value is not None and (counts is self.behaviour.stalls or value <= 1):
                del counts[name]
            elif value is not None:
                counts[name] = value - 1
            return value


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        """No log."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.behaviour = Behaviour(**json.loads(data))
        self.hub.seen.clear()
        self.hub.stalled.clear()
        self.send(200, {}, b"{}")

    def answer(self, *, body: bool) -> None:
        raise NotImplementedError

    def send(self, status: int, headers: dict[str, str], data: bytes, *, body: bool = True) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def note(self, place: str, path: str) -> None:
        entry = {"method": self.command, "place": place, "path": path, "range": self.headers.get("Range")}
        self.hub.seen.append(entry | {"token": self.headers.get("Authorization")})

    def send_file(self, name: str, path: Path, headers: dict[str, str], *, body: bool) -> None:
        hub, faults = self.hub, self.hub.behaviour
        data = path.read_bytes()
        if not body:
            return self.send(200, headers, data, body=False)
        if name in faults.file_status:
            return self.send(faults.file_status[name], self.retry_after(), b"")
        if hub.spend(faults.html, name) is not None:
            return self.send(200, {"Content-Type": "text/html; charset=utf-8"}, HTML)
        if hub.spend(faults.changed, name) is not None:
            data = bytes(byte ^ 1 for byte in data)
        status, rest = 200, data
        asked = self.headers.get("Range", "")
        if asked and name not in faults.whole:
            start, _, last = asked.removeprefix("bytes=").partition("-")
            end = int(last) if last else len(data) - 1
            status, rest = 206, data[int(start) : end + 1]
            headers |= {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        cut, stall = hub.spend(faults.cuts, name), hub.spend(faults.stalls, name)
        kept = rest if cut is None and stall is None else rest[: stall if cut is None else cut]
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(rest))}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(kept)
        if stall is not None:
            self.wfile.flush()
            self.hub.stalled.set()
            self.rfile.read(1)  # until the client leaves
        if kept is not rest:
            self.close_connection = True

    def retry_after(self) -> dict[str, str]:
        wait = self.hub.behaviour.retry_after
        return {"Retry-After": wait} if wait else {}

    def refuse(self, status: int, code: str = "", *, body: bool = True) -> None:
        self.send(status, {"X-Error-Code": code} if code else {}, b"", body=body)


class HubHandler(Handler):
    """The first address: listings, announcements and small files."""

    def answer(self, *, body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        if path == "/_seen":
            return self.send(200, {}, json.dumps(self.hub.seen).encode())
        if path == "/_stalled":
            self.hub.stalled.wait()
            return self.send(200, {}, b"")
        self.note("hub", path)
        faults = self.hub.behaviour
        if faults.status:
            reason = {"X-Error-Message": faults.reason} if faults.reason else {}
            return self.send(faults.status, self.retry_after() | reason, b"", body=body)
        if path.startswith("/api/models/"):
            return self.list_repository(path.removeprefix("/api/models/"))
        kept = "/resolve-cache/" in path
        repo, _, rest = path.removeprefix("/kept").strip("/").partition("/resolve-cache/" if kept else "/resolve/")
        asked, _, name = rest.partition("/")
        if self.is_closed(repo):
            return self.refuse(401, "RepoNotFound", body=body)
        if repo in faults.gated:
            return self.refuse(403, "GatedRepo", body=body)
        revision = self.hub.revision(repo, asked)
        file = None if revision is None else self.hub.files(repo, revision).get(name)
        if revision is None or file is None:
            return self.refuse(404, "EntryNotFound", body=body)
        return self.announce(repo, revision, name, file, body=body)

    def list_repository(self, path: str) -> None:
        faults = self.hub.behaviour
        if path.endswith("/refs"):
            known = self.hub.revisions(path.removesuffix("/refs"))
            listed = [{"name": name, "ref": name, "targetCommit": commit} for name, commit in known.items()]
            body = {"branches": listed[:1], "tags": listed[1:], "converts": []}
            return self.send(200, {}, json.dumps(body).encode())
        repo, _, asked = path.partition("/revision/")
        if not self.hub.revisions(repo) or self.is_closed(repo):
            return self.refuse(401, "RepoNotFound")
        revision = self.hub.revision(repo, asked or "main")
        if revision is None:
            return self.refuse(404, "RevisionNotFound")
        if faults.listing:
            return self.send(200, {"Content-Type": "text/html"}, faults.listing.encode())
        siblings = [self.sibling(name, file) for name, file in self.hub.files(repo, revision).items()]
        info = {
            "id": repo,
            "modelId": repo,
            "sha": commit_of(self.hub.home(repo, revision)),
            "siblings": siblings,
            "private": False,
        }
        return self.send(200, {"Content-Type": "application/json"}, json.dumps(info | {"tags": []}).encode())

    def sibling(self, name: str, file: Path) -> dict[str, Any]:
        data = file.read_bytes()
        size = self.hub.behaviour.sizes.get(name, len(data))
        entry = {"rfilename": name, "size": size, "blobId": git_digest(data)}
        if name.endswith(LARGE_SUFFIXES):
            entry["lfs"] = {"size": size, "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
        return entry

    def announce(self, repo: str, revision: str, name: str, file: Path, *, body: bool) -> None:
        headers = {"X-Repo-Commit": commit_of(self.hub.home(repo, revision)), "Accept-Ranges": "bytes"}
        data = file.read_bytes()
        size = str(self.hub.behaviour.sizes.get(name, len(data)))
        if not name.endswith(LARGE_SUFFIXES):
            if "/resolve/" in self.path:  # small files are behind a redirect on the same host
                place = f"/kept{self.path.replace('/resolve/', '/resolve-cache/')}"
                return self.send(307, headers | {"Location": place}, b"", body=body)
            headers |= {"ETag": f'"{git_digest(data)}"'} | ({} if body else {"Content-Length": size})
            return self.send_file(name, file, headers, body=body)
        digest = hashlib.sha256(data).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": size, "ETag": '"of-the-redirect"'}
        headers |= {"Location": f"{self.hub.cdn}/{repo}@{revision.replace('/', '%252F')}/{name}"}
        return self.send(302, headers, b"", body=body)

    def is_closed(self, repo: str) -> bool:
        token = self.hub.behaviour.private.get(repo)
        return token is not None and self.headers.get("Authorization") != f"Bearer {token}"


class CdnHandler(Handler):
    """The second address: the bytes of large files, for signed links without a token."""

    def answer(self, *, body: bool) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        self.note("cdn", path)
        if self.headers.get("Authorization"):
            return self.refuse(400, body=body)
        name = "/".join(path.split("/")[2:])
        return self.send_file(name, self.hub.folder / path, {"ETag": '"of-the-cdn"'}, body=body)


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of the tests."""


def main() -> None:
    hub = Hub(Path(sys.argv[1]))
    servers = [
        Server(("127.0.0.1", 0), type(kind.__name__, (kind,), {"hub": hub})) for kind in (HubHandler, CdnHandler)
    ]
    urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    hub.cdn = urls[1]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(urls), flush=True)
    sys.stdin.read()  # until the test's process ends


if __name__ == "__main__":
    main()
