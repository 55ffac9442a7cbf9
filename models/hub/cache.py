"""The hub's cache on this machine, in the layout that `huggingface_hub` documents and shares between programs.

models--OWNER--NAME/blobs/ETAG holds a file, snapshots/COMMIT/PATH links to it, refs/REVISION names a commit.
"""

import os
import re
import shutil
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Cache:
    """One repository's part of the cache."""

    def __init__(self, root: Path, repo: str) -> None:
        """
        Args:
            root: the cache folder of all repositories.
            repo: owner/name.
        """
        self.root = root
        self._owner = f"models--{repo.replace('/', '--')}"
        self.folder = root / self._owner

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch or tag stood for when it was downloaded; None: it never was."""
        if is_commit(revision):
            return revision
        try:
            commit = (self.folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            return None
        return commit if is_commit(commit) else None

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def names(self, commit: str) -> frozenset[str]:
        """The files of a commit that are here, as paths within the repository."""
        folder = self.snapshot(commit)
        return frozenset(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def size(self, commit: str, name: str) -> int | None:
        """Bytes of a file; None: it is not here."""
        try:
            return (self.snapshot(commit) / name).stat().st_size
        except OSError:
            return None

    def blob(self, etag: str) -> Path:
        """The path of a file's bytes; its folder exists."""
        path = self.folder / "blobs" / etag
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def lock(self, etag: str) -> Path:
        """The file that is locked while a blob is written; its folder exists."""
        path = self.root / ".locks" / self._owner / f"{etag}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def link(self, etag: str, commit: str, name: str) -> None:
        """Make a blob a file of a commit."""
        blob, path = self.blob(etag), self.snapshot(commit) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except FileExistsError:  # another process was faster
            return
        except OSError:  # a file system without links
            shutil.copyfile(blob, path)

    def remove(self, commit: str, name: str) -> None:
        """Remove a damaged file of a commit, with its blob."""
        path = self.snapshot(commit) / name
        if path.is_symlink():
            target = path.parent / path.readlink()
            if os.path.realpath(target.parent) == os.path.realpath(self.folder / "blobs"):
                target.unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def record(self, revision: str, commit: str) -> None:
        """Remember the commit of a branch or tag; done last, when all files of the commit are here."""
        path = self.folder / "refs" / revision
        if is_commit(revision) or self.commit_of(revision) == commit:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        written.write_text(commit)
        os.replace(written, path)


def is_commit(text: str) -> bool:
    """True if this is the full hash of a commit."""
    return _COMMIT.fullmatch(text) is not None
