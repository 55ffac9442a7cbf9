"""Input embeddings from a caller's own arrays, by the methods that arrays share: no tensor library is imported here."""

import math
from typing import Any, TypedDict

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import EmbedsPrompt as Embeds

_FIELD = "prompt_embeds"


class EmbedsPrompt(TypedDict, total=False):
    """vLLM's mapping for a prompt of input embeddings."""

    prompt_embeds: Any
    """See `as_embeds`."""
    cache_salt: str


def as_embeds(value: Any) -> Embeds:
    """A prompt of embeddings.

    Args:
        value: a torch tensor, a numpy array, or anything else that gives away its memory: [tokens, hidden], or
            [1, tokens, hidden], of floating-point numbers.

    Raises:
        InvalidRequest: it has another shape or type, or a number in it is not finite.
    """
    if isinstance(value, Embeds):
        return value
    try:
        if hasattr(value, "detach"):  # a tensor, wherever it lies
            value = value.detach().to("cpu").float().contiguous().numpy()
        if hasattr(value, "astype"):
            value = value.astype("<f4")
        view = memoryview(value)
    except (TypeError, ValueError):
        raise _wrong() from None
    shape = view.shape or ()
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or not all(shape) or view.format not in ("f", "<f") or view.itemsize != 4:
        raise _wrong()
    raw = view.tobytes()
    plain = memoryview(raw).cast("f")
    extremes = (value.min(), value.max()) if hasattr(value, "astype") else (sum(plain),)  # NaN comes through either way
    if not all(math.isfinite(extreme) for extreme in extremes):
        raise InvalidRequest(f"{_FIELD} has a number that is not finite, or too large", param=_FIELD)
    return Embeds(raw, shape[0])


def _wrong() -> InvalidRequest:
    return InvalidRequest(
        f"{_FIELD} must be an array of floating-point numbers, [tokens, hidden]", param=_FIELD, code="invalid_type"
    )
