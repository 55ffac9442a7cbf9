"""A loopback hub and a resolver of models, each a process of its own, as tests see them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.hub.hub_server import commit_of

SUPPORT = Path(__file__).parent
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")


class LoopbackHub:
    """Repositories are folders on disk; faults and requests are told over HTTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(SUPPORT / "hub_server.py"), str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url, self.cdn = json.loads(self.process.stdout.readline())
        self.client = httpx.Client(base_url=self.url, trust_env=False, verify=NO_TLS, timeout=30)

    def reset(self) -> None:
        """No repositories, no faults, no requests."""
        for path in self.folder.iterdir():
            shutil.rmtree(path)
        self.behave()

    def add(self, repo: str, files: Mapping[str, bytes] | Path, revision: str = "main") -> str:
        """Publish a revision, or change files of it; returns its commit."""
        home = self.folder / f"{repo}@{revision.replace('/', '%2F')}"
        if isinstance(files, Path):
            shutil.copytree(files, home)
        else:
            for name, data in files.items():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_bytes(data)
        return commit_of(home)

    def commit(self, repo: str, revision: str = "main") -> str:
        return commit_of(self.folder / f"{repo}@{revision.replace('/', '%2F')}")

    def behave(self, **faults: Any) -> None:
        """Set the faults and forget the requests; see `hub_server.Behaviour`."""
        self.client.post("/_behave", json=faults).raise_for_status()

    def until_stalled(self) -> None:
        """Wait for a download that stalls."""
        self.client.get("/_stalled", timeout=60).raise_for_status()

    def seen(self) -> list[dict[str, Any]]:
        """The requests since then."""
        seen: list[dict[str, Any]] = self.client.get("/_seen").json()
        return seen

    def downloads(self) -> list[tuple[str, str | None]]:
        """Name and range of each file whose bytes were asked for, in order."""
        found = []
        for entry in self.seen():
            if entry["method"] != "GET" or entry["path"].startswith("/api/"):
                continue
            if entry["place"] == "cdn":
                found.append(("/".join(entry["path"].split("/")[2:]), entry["range"]))
            elif "/resolve-cache/" in entry["path"]:
                found.append(("/".join(entry["path"].partition("/resolve-cache/")[2].split("/")[1:]), entry["range"]))
        return found

    def names(self) -> list[str]:
        """The files whose bytes were asked for."""
        return sorted(name for name, _ in self.downloads())

    def close(self) -> None:
        self.client.close()
        self.process.communicate(timeout=30)


@dataclass
class Outcome:
    """How a name was resolved."""

    path: Path | None
    error: str
    hint: str
    progress: list[dict[str, Any]]

    @property
    def folder(self) -> Path:
        assert self.path is not None, self.error
        return self.path

    @property
    def names(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    @property
    def notes(self) -> str:
        return "\n".join(one["detail"] for one in self.progress if one["phase"] == "resolve")

    @property
    def downloads(self) -> list[dict[str, Any]]:
        return [one for one in self.progress if one["phase"] == "download"]


class Resolver:
    """`resolve_model` in a process with an environment of its own."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, str(SUPPORT / "resolver.py")]
        self.process = subprocess.Popen(
            command, env=clean_environment() | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, model: str, env: Mapping[str, str | None], *, checked: bool = False, **config: Any) -> None:
        assert self.process.stdin is not None
        request = {"config": {"model": model, **config}, "env": dict(env), "checked": checked}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def end(self) -> Outcome:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        path = answer.get("path")
        found = Path(path) if path else None
        return Outcome(found, answer.get("error", ""), answer.get("hint") or "", answer["progress"])

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.process.communicate(timeout=30)


def until_written(blobs: Path, etag: str) -> Path:
    """Wait until another process has written bytes of a file that stalls.

    The partial file is returned, not its size: the other process may write more until it is ended.
    """
    part = blobs / f"{etag}.partial"
    while not part.exists() or not part.stat().st_size:
        os.sched_yield()
    return part


def clean_environment() -> dict[str, str]:
    """Of a process that is to know nothing of this machine's hub settings and proxies."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


@contextmanager
def loopback_hub(folder: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(folder)
    try:
        yield hub
    finally:
        hub.close()
