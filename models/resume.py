"""Hub files, downloaded so that a run that was killed goes on where it stopped.

`huggingface_hub` throws a partial file away when its process ends. Here the bytes gather in `<etag>.partial` beside the
cache's blobs; once whole they become the blob, and `huggingface_hub` only has to link it.
"""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from troupellm.protocol.errors import ModelLoadError

_SAFE_ETAG = re.compile(r"[0-9A-Za-z_-]{8,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Bar(Protocol):
    """The part of a tqdm bar that `huggingface_hub` uses."""

    def update(self, n: float | None = 1) -> None:
        """So many bytes more; fewer than 0 when a server starts over."""


def fetch_blob(
    repo: str,
    name: str,
    *,
    revision: str,
    cache: Path,
    token: str | None,
    endpoint: str | None,
    bar: Callable[[int], Bar],
) -> None:
    """Make sure that the cache has the blob of a file; leaves files without a usable etag to `huggingface_hub`.

    Args:
        revision: commit hash.
        bar: makes the progress bar of this file, given how many bytes are there already.

    Raises:
        ModelLoadError: what arrived is not what the hub announced.
        OSError: or the HTTP library's errors, when the connection fails for good.
    """
    import huggingface_hub
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    url = huggingface_hub.hf_hub_url(repo, name, revision=revision, endpoint=endpoint)
    metadata = huggingface_hub.get_hf_file_metadata(url, token=token)
    if not metadata.size or not metadata.etag or not _SAFE_ETAG.fullmatch(metadata.etag):
        return
    owner = f"models--{repo.replace('/', '--')}"
    blob = cache / owner / "blobs" / metadata.etag
    lock = cache / ".locks" / owner / f"{metadata.etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        partial = blob.with_name(f"{metadata.etag}.partial")
        with partial.open("ab") as file:
            start = file.tell()
            if start > metadata.size:
                start = 0
                file.truncate(0)
            headers = build_hf_headers(token=token)
            http_get(url, file, resume_size=start, headers=headers, expected_size=metadata.size, _tqdm_bar=bar(start))
        if start and _SHA256.fullmatch(metadata.etag) and _digest(partial) != metadata.etag:
            partial.unlink()  # two different beginnings and ends; the next start begins anew
            raise ModelLoadError(f"{name} was damaged in the download", hint="start again")
        os.replace(partial, blob)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
