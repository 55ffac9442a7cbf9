"""Downloads a repository of the hub into the cache: only files that are read, and no file twice."""

import os
import re
import shutil
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import msgspec

from troupellm.models.hub.cache import Cache, is_commit
from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.files import is_safe_path
from troupellm.models.hub.meter import Meter
from troupellm.models.hub.resume import fetch_blob, is_digest
from troupellm.protocol.config.sizes import human_size
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import ProgressSink

_CONNECT_SECONDS, _ANSWER_SECONDS = 4.0, 6.0
"""A cached snapshot serves soon, or the refusal comes soon, where there is no connection."""
_SAFE_ETAG = re.compile(r"[0-9A-Za-z_-]{8,128}")


class Unavailable(Exception):
    """The hub gives no answer that is one; the text says why."""


class _Listed(NamedTuple):
    """A file as the listing of the repository has it."""

    size: int | None
    blob_id: str | None
    """The file's id in git."""
    sha256: str | None
    """The digest of a file in LFS."""


class _Announced(msgspec.Struct, frozen=True):
    """A file as the hub announces it before its bytes."""

    name: str
    url: str
    etag: str
    size: int
    digest: str | None
    earlier: int
    """Bytes that a killed download left."""


class Repository:
    """One revision of a repository, whose files are asked for by their commit."""

    def __init__(
        self, repo: str, cache: Cache, *, token: str | None, endpoint: str | None, progress: ProgressSink
    ) -> None:
        from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url

        self._repo, self._cache, self._meter = repo, cache, Meter(progress)
        self._token, self._endpoint = token, endpoint
        self._api = HfApi(endpoint=endpoint, token=token)
        given = "HF_HUB_ETAG_TIMEOUT" in os.environ
        answer = float(constants.HF_HUB_ETAG_TIMEOUT) if given else _ANSWER_SECONDS
        self._timeout = (min(_CONNECT_SECONDS, answer), answer, answer, answer)
        """Timeouts to connect, read, write, and get a connection of the pool."""
        self._metadata, self._url = get_hf_file_metadata, hf_hub_url
        self._files: dict[str, _Listed] = {}
        self.commit = ""

    def open(self, revision: str) -> None:
        """List the files.

        Raises:
            Unavailable: the answer is no listing.
            HFValidationError: the name can be no repository's.
            OSError: or the HTTP library's errors.
        """
        from huggingface_hub.errors import HFValidationError

        try:
            info = self._api.model_info(self._repo, revision=revision, files_metadata=True, timeout=self._timeout)
            listed = {
                str(file.rfilename): _Listed(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)
                for file in info.siblings or ()
            }
            commit = str(info.sha)
        except HFValidationError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unavailable("the hub's answer is no list of files") from error
        if not is_commit(commit):
            raise Unavailable("the hub's answer names no commit")
        self.commit = commit
        self._files = {name: file for name, file in listed.items() if is_safe_path(name)}

    @property
    def names(self) -> Collection[str]:
        """Paths of all files of the repository."""
        return self._files.keys()

    def size(self, name: str) -> int | None:
        """Bytes of a file, as the listing has them; None where it does not say."""
        return self._files[name].size

    def revisions(self) -> list[str]:
        """The branches and tags; empty if the hub does not list them."""
        try:
            refs = self._api.list_repo_refs(self._repo)
            return [str(ref.name) for ref in (*refs.branches, *refs.tags)]
        except Exception:  # an error of this kind must not hide the one that is reported
            return []

    def fetch(self, names: Collection[str]) -> None:
        """Have these files in the cache's snapshot of the commit.

        Raises:
            ModelLoadError: the disk has no room, or a file was damaged twice.
            Unavailable: an answer is not that of a hub.
            OSError: or the HTTP library's errors; partial files stay.
        """
        missing = [self._announced(name) for name in names if not self._is_here(name)]
        total, earlier = sum(file.size for file in missing), sum(file.earlier for file in missing)
        self._require_space(total - earlier)
        self._meter.expect(total, earlier)
        for file in missing:
            self._fetch(file)

    def _is_here(self, name: str) -> bool:
        """True if the cache has the file; a file of another size is damaged, and is removed."""
        size, listed = self._cache.size(self.commit, name), self._files[name].size
        if size is None:
            return False
        if listed is None or size == listed:
            return True
        self._cache.remove(self.commit, name)
        return False

    def _announced(self, name: str) -> _Announced:
        listed = self._files[name]
        url = self._url(self._repo, name, revision=self.commit, endpoint=self._endpoint)
        found = self._metadata(url, token=self._token, timeout=self._timeout, endpoint=self._endpoint)
        etag, size = found.etag, found.size if found.size is not None else listed.size
        if not etag or size is None or _SAFE_ETAG.fullmatch(etag) is None:
            raise Unavailable(f"the hub's answer about {plain_name(name)} has no size or etag")
        digest = listed.sha256 or (etag if is_digest(etag) or etag == listed.blob_id else None)
        left = self._cache.blob(etag).with_name(f"{etag}.partial")
        earlier = min(size, left.stat().st_size) if left.exists() else 0
        return _Announced(name, url, etag, size, digest, earlier)

    def _fetch(self, file: _Announced) -> None:
        from huggingface_hub.utils import WeakFileLock, build_hf_headers

        meter = self._meter
        meter.begin(file.earlier)
        blob = self._cache.blob(file.etag)
        with WeakFileLock(self._cache.lock(file.etag)):
            if blob.exists() and blob.stat().st_size != file.size:
                blob.unlink()
            if not blob.exists():
                headers = build_hf_headers(token=self._token)
                report = partial(meter.report, file.name)
                fetch_blob(file.url, blob, file.name, file.size, file.digest, headers, report)
        self._cache.link(file.etag, self.commit, file.name)
        meter.report(file.name, file.size, whole=True)

    def _require_space(self, needed: int) -> None:
        self._cache.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache.root).free
        if needed > free:
            raise ModelLoadError(
                f"{self._repo} needs {human_size(needed)}, {human_size(free)} free in {self._cache.root}",
                hint="free some space, or name another folder with --download-dir",
            )
