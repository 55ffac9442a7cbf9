"""Images in the contents of chat messages: `image_url` parts, with the image itself or its address."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, Final

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.media import MediaSource

IMAGE_PART: Final = {"type": "image"}
"""Stands for an image in a message that a chat template reads."""
KINDS: Final = ("image_url", "input_image")
PLACE: Final = "\0field"
"""Key of a part that another API's reader has made: the place that errors name."""
_DATA = re.compile(r"data:(?P<kind>[^;,]*)(?P<options>(;[^;,]*)*),", re.IGNORECASE)


def is_image(part: object) -> bool:
    """True for a part that is an image, whether or not it is well-formed."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def image_source(part: Mapping[str, Any], field: str) -> MediaSource:
    """The image of a part.

    Args:
        field: the part's place in the request.

    Raises:
        InvalidRequest: it has no URL, or a data: URL that is broken or no image.
    """
    given, field = part.get("image_url"), part.get(PLACE, field)
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{field} must have an image_url with a url", param=field)
    if url[:5].lower() != "data:":
        return MediaSource(url=url, field=field)
    found = _DATA.match(url)
    if found is None or not found["options"].lower().endswith(";base64"):
        raise InvalidRequest(f"{field}: a data: URL must be like data:image/png;base64,...", param=field)
    if not found["kind"].lower().startswith("image/"):
        raise InvalidRequest(f"{field}: the data: URL says that it is no image", param=field)
    return MediaSource(data=decoded(url[found.end() :], field), field=field)


def decoded(text: str, field: str) -> bytes:
    """The bytes of base64.

    Raises:
        InvalidRequest: it is broken, or there are none.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{field}: the image's base64 is broken", param=field) from None
    if not data:
        raise InvalidRequest(f"{field}: the image has no bytes", param=field)
    return data
