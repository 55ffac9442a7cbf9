"""Image blocks of Anthropic's API as parts of a chat message."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.openai.image_parts import PLACE

Part = str | dict[str, Any]
IMAGE: Final = "image"
SEE_BELOW: Final = "[image: see the next message]"
"""Stands in a tool's result for its images."""


def image_part(block: Mapping[str, Any], here: str) -> dict[str, Any]:
    """
    Raises:
        InvalidRequest: its source is neither base64 nor a URL.
    """
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    url: object = None
    if isinstance(source, Mapping) and kind == "base64" and isinstance(source.get("data"), str):
        media_type = source.get("media_type")
        url = f"data:{media_type if isinstance(media_type, str) else 'image/*'};base64,{source['data']}"
    elif isinstance(source, Mapping) and kind == "url":
        url = source.get("url")
    if not isinstance(url, str) or not url:
        param = f"{here}.source"
        raise InvalidRequest(f"{param} must be of type base64 with data, or of type url with a url", param=param)
    return {"type": "image_url", "image_url": {"url": url}, PLACE: here}


def joined_parts(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    """A content: one text where there is no image, else texts and images in their order, adjacent texts as one."""
    if all(isinstance(part, str) for part in parts):
        return "\n\n".join([part for part in parts if isinstance(part, str)])
    joined: list[dict[str, Any]] = []
    for are_texts, run in groupby(parts, lambda part: isinstance(part, str)):
        if are_texts:
            joined.append({"type": "text", "text": "\n\n".join([part for part in run if isinstance(part, str)])})
        else:
            joined += [part for part in run if not isinstance(part, str)]
    return joined
