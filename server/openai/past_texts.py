"""Texts of past contents, in the forms of every API: any server or client may have written them.

A placeholder stands for an image, a sound or a file; other parts without text are left out. The client is told of both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

MEDIA = ("image", "audio", "video", "file")
_AS_FILES = ("document", "pdf", "attachment")
_RESULTS = ("tool", "function")
"""Roles of the results of tools."""
_FIELDS = {"refusal": "refusal", "tool_reference": "tool_name"}
"""Where parts of a type have their text; those of all others have it in `text`."""


class PastTexts(msgspec.Struct, frozen=True):
    texts: list[str]
    skipped: list[str]
    """Types of the parts that are not shown as they are."""


def newest_places(roles: Sequence[str]) -> frozenset[int]:
    """Which messages are the newest turn's own: the user's last message, and the last message of all.

    A message behind the results of tools is neither: clients put the images of results there.

    Args:
        roles: of the messages in order; results have tool or function, and other entries an empty text.
    """
    known = max((place for place, role in enumerate(roles) if role in ("assistant", *_RESULTS)), default=-1)
    if known >= 0 and roles[known] in _RESULTS:
        return frozenset()
    users = [place for place, role in enumerate(roles) if role == "user"]
    others = [place for place, role in enumerate(roles) if role]
    return frozenset(place for place in (*users[-1:], *others[-1:]) if place > known)


def media_of(kind: str) -> str | None:
    """The medium of a type of part: image, audio, video or file; None for other types."""
    if any(word in kind for word in _AS_FILES):
        return "file"
    return next((medium for medium in MEDIA if medium in kind), None)


def omitted(medium: str) -> str:
    """Stands in the place of an image, a sound, a film or a file."""
    return f"[{medium} omitted: this model reads text only]"


def past_texts(content: object) -> PastTexts:
    """The texts of a content: a text, a part, or a list of both. Never fails."""
    texts: list[str] = []
    skipped: list[str] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        if isinstance(part, list | tuple):
            found = past_texts(part)
            texts += found.texts
            skipped += found.skipped
        else:
            _read(part, texts, skipped)
    return PastTexts(texts, skipped)


def _read(part: object, texts: list[str], skipped: list[str]) -> None:
    if isinstance(part, str):
        texts.append(part)
        return
    if part is None:
        return
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str | None):
        skipped.append(type(part).__name__)
        return
    kind = kind or "text"
    inner = _inner(part, kind)
    if inner is not None:
        found = past_texts(inner)
        texts += found.texts
        skipped += found.skipped
        return
    text = part.get(_FIELDS.get(kind, "text"))
    medium = media_of(kind)
    if isinstance(text, str):
        texts.append(text)
    elif medium is not None:
        texts.append(omitted(medium))
        skipped.append(kind)
    else:
        skipped.append(kind)


def _inner(part: Mapping[str, Any], kind: str) -> object:
    """The content that a part encloses; None for a part without one."""
    source = part.get("source")
    if kind == "document" and isinstance(source, Mapping):
        return {"text": source.get("data"), "content": source.get("content")}.get(str(source.get("type")))
    if kind == "search_result":
        title = part.get("title")
        inner = past_texts(part.get("content")).texts
        return "\n".join([*([title] if isinstance(title, str) else []), *inner])
    if kind == "resource" and isinstance(resource := part.get("resource"), Mapping):
        return resource.get("text", {"type": "file"})
    return None
