"""Names of hub models: owner/name, with a revision, a tag of a GGUF file or the file itself."""

import re
from typing import NamedTuple

from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.files import is_safe_path
from troupellm.protocol.errors import ModelLoadError

SCHEME = "hf://"
_FORM = re.compile(
    r"(?P<repo>\w[\w.-]*(?:/\w[\w.-]*)?)"
    r"(?:@(?P<revision>refs/[^/:@]+/[^/:@]+|[^:@]+?))?"
    r"(?::(?P<tag>[^:/@]+))?"
    r"(?:/(?P<file>.+\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_LONGEST_REPO = 96
"""As the hub has it."""


class HubName(NamedTuple):
    repo: str
    """owner/name, or the name alone of a few old models."""
    revision: str | None = None
    """Branch, tag or commit."""
    tag: str | None = None
    """Part of the name of a GGUF file or of its folder, such as Q4_K_M."""
    file: str | None = None
    """Path of a GGUF file in the repository."""

    @property
    def with_tag(self) -> str:
        """As clients call it: without the revision."""
        return self.repo if self.tag is None else f"{self.repo}:{self.tag}"


def parse_hub_name(text: str) -> HubName | None:
    """Read a name such as hf://owner/name@revision:TAG or owner/name/file.gguf; None: it is no name of a hub model.

    Raises:
        ModelLoadError: it names a tag and a file.
    """
    match = _FORM.fullmatch(text.removeprefix(SCHEME))
    if match is None:
        return None
    name = HubName(**match.groupdict())
    repo = name.repo
    if "--" in repo or repo.endswith((".git", "-", ".")) or ".." in text or len(repo) > _LONGEST_REPO:
        return None
    if repo.lower().endswith(".gguf") or (name.file is not None and "/" not in repo):
        return None  # a file on this machine, which is not there
    if name.tag is not None and name.file is not None:
        raise ModelLoadError(
            f"{plain_name(text)} names the tag {name.tag} and a file", hint=f"leave out :{name.tag}, or the file"
        )
    return name


def chosen_revision(name: HubName, revision: str | None) -> str | None:
    """The revision that is asked for, in the name or beside it.

    Raises:
        ModelLoadError: both are given, or it can be no revision.
    """
    if name.revision is not None and revision is not None:
        raise ModelLoadError(
            f"the revision is given twice: @{plain_name(name.revision)} in the model's name and "
            f"--revision {plain_name(revision)}",
            hint="leave out one of them",
        )
    if revision and not is_safe_path(revision):  # the cache has a file of that name
        raise ModelLoadError(
            f"--revision {plain_name(revision)} can be no revision", hint="name a branch, tag or commit"
        )
    return name.revision or revision
