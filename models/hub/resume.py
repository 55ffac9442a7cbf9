"""One file of the hub, downloaded so that a killed process resumes at the last byte that it wrote.

`huggingface_hub` deletes a partial file when its process ends, and does not download files over 50 GB by plain HTTP.
Here the bytes go to `ETAG.partial` beside the cache's blobs and are requested in ranges. When all of them are there and
their digest is right, the file becomes the blob.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from troupellm.models.hub.errors import plain_name
from troupellm.protocol.errors import ModelLoadError

RANGE_BYTES = 16 * 2**30
"""Most bytes of one request: signed addresses expire, and CDNs refuse larger ones."""
_FIRST_RETRIES, _RETRIES = 2, 5
"""Before the first byte a failure is an answer to the user, later it is an interruption."""
_LONGEST_WAIT = 8.0
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class Damaged(Exception):
    """The body that arrives is not the file; the text says why."""


def fetch_blob(
    url: str,
    blob: Path,
    name: str,
    size: int,
    digest: str | None,
    headers: dict[str, str],
    report: Callable[[int], None],
) -> None:
    """Download a file to `blob`, which does not exist. A damaged one is removed and fetched again, once.

    Args:
        url: on the hub; may redirect to another host, which does not get the `Authorization` header.
        name: of the file, for messages.
        size: bytes that the hub announces.
        digest: SHA-256 of the file, or SHA-1 of it as a git blob, as hex; None: only the size is compared.
        headers: of the request, with the user's token.
        report: is told how many bytes are here.

    Raises:
        ModelLoadError: the file was damaged twice.
        OSError: or the HTTP library's errors, when the connection fails for good; the bytes so far stay.
    """
    partial = blob.with_name(f"{blob.name}.partial")
    reason = ""
    for _ in range(2):
        try:
            with partial.open("a+b") as file:
                _Transfer(file, url, size, digest, headers, report).run()
        except Damaged as error:
            partial.unlink()
            reason = str(error)
            continue
        os.replace(partial, blob)
        return
    raise ModelLoadError(
        f"{plain_name(name)} was damaged in the download, twice, and removed: {reason}", hint="start again later"
    )


class _Transfer:
    """One attempt at a file, with the bytes of earlier ones."""

    def __init__(
        self,
        file: BinaryIO,
        url: str,
        size: int,
        digest: str | None,
        headers: dict[str, str],
        report: Callable[[int], None],
    ) -> None:
        self._file, self._url, self._size, self._digest = file, url, size, digest
        self._headers = headers | {"Accept-Encoding": "identity"}
        self._report = report
        self._at = 0
        self._hash = self._new_hash()

    def run(self) -> None:
        """Raises Damaged, or the HTTP library's errors."""
        self._read_earlier_bytes()
        first, furthest, failures = self._at, self._at, 0
        while self._at < self._size:
            try:
                self._request()
                error: Exception | None = None
            except Exception as caught:
                if not _is_transient(caught):
                    raise
                error = caught
            if self._at > furthest:
                furthest, failures = self._at, 0
                continue
            failures += 1
            if failures > (_RETRIES if furthest > first else _FIRST_RETRIES):
                raise error or Damaged(f"the server sends {self._at} of {self._size} bytes")
            self._file.flush()
            time.sleep(min(_LONGEST_WAIT, 0.5 * 2 ** (failures - 1)))
        if self._digest is not None and self._hash.hexdigest() != self._digest:
            raise Damaged(f"its digest is {self._hash.hexdigest()}, the hub says {self._digest}")

    def _read_earlier_bytes(self) -> None:
        if self._file.tell() > self._size:
            self._file.truncate(0)
        self._file.seek(0)
        while chunk := self._file.read(2**20):
            self._hash.update(chunk)
            self._at += len(chunk)
            self._report(self._at)

    def _request(self) -> None:
        """Ask for the next range."""
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status

        last = min(self._at + RANGE_BYTES, self._size) - 1
        headers = self._headers | {"Range": f"bytes={self._at}-{last}"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT  # without a byte from the server
        with get_session().stream("GET", self._url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            self._check_answer(response)
            for chunk in response.iter_bytes():
                if self._at + len(chunk) > self._size:
                    raise Damaged(f"the server sends more than {self._size} bytes")
                self._file.write(chunk)
                self._hash.update(chunk)
                self._at += len(chunk)
                self._report(self._at)

    def _check_answer(self, response: Any) -> None:
        if str(response.headers.get("Content-Type", "")).startswith("text/html"):
            raise Damaged("the server sends a page of HTML instead")
        if response.status_code != 206:  # the whole file, although a range was asked for
            self._restart()
            return
        begin = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if begin is None or int(begin[1]) != self._at:
            raise Damaged(f"the server sends another range than from byte {self._at}")

    def _restart(self) -> None:
        self._file.truncate(0)
        self._at, self._hash = 0, self._new_hash()
        self._report(0)

    def _new_hash(self) -> _Hash:
        if self._digest is not None and _SHA1.fullmatch(self._digest):
            return hashlib.sha1(b"blob %d\0" % self._size, usedforsecurity=False)
        return hashlib.sha256()


def is_digest(text: str) -> bool:
    """True if the text is a SHA-256, the name of large files."""
    return _SHA256.fullmatch(text) is not None


def _is_transient(error: Exception) -> bool:
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        wait = error.response.headers.get("Retry-After", "")
        return error.response.status_code in _TRANSIENT and not (wait.isdecimal() and int(wait) > _LONGEST_WAIT)
    return isinstance(error, errors.HTTPError)
