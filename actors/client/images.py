"""Images in the messages of `Engine.chat`: bytes of a file, a path, or an image of Pillow."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.media import MediaSource

Messages = Sequence[Mapping[str, Any]]


def taken_images(messages: Messages) -> tuple[Messages, tuple[MediaSource, ...]]:
    """The messages with plain parts of type image, and the images of these parts.

    Raises:
        InvalidRequest: a part of type image has none, or one that cannot be read; names it.
    """
    if not any(isinstance(message.get("content"), list | tuple) for message in messages):
        return messages, ()
    found: list[MediaSource] = []
    made: list[Mapping[str, Any]] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list | tuple):
            made.append(message)
            continue
        parts = []
        for position, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") == "image":
                field = f"messages[{place}].content[{position}]"
                found.append(MediaSource(data=_file(part.get("image"), field), field=field))
                part = {"type": "image"}
            parts.append(part)
        made.append({**message, "content": parts})
    return made, tuple(found)


def _file(image: object, field: str) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{field}: the image cannot be read: {error.strerror}", param=field) from None
    save = getattr(image, "save", None)
    if save is None:
        raise InvalidRequest(f"{field}.image must be bytes, a path or an image of Pillow", param=field)
    buffer = io.BytesIO()
    try:
        save(buffer, "PNG")
    except (OSError, ValueError, KeyError) as error:  # a mode that PNG does not have, or a file that is broken
        raise InvalidRequest(f"{field}: the image cannot be read: {error}", param=field) from None
    return buffer.getvalue()
