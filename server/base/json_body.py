"""Request bodies as strict JSON, decoded into one typed Struct. Unknown fields that look like sampling are logged."""

import logging
import re
from typing import Any, TypeVar

import anyio
import msgspec

from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import INLINE_BYTES
from troupellm.server.base.body_room import Reservation
from troupellm.server.base.errors import invalid_json
from troupellm.server.base.threads import offload

MAX_DEPTH = 64
MAX_CONTAINERS = 200_000
"""Objects and lists of one body: like short strings they cost far more than their bytes, and hold up all threads."""
MAX_STRINGS = 500_000
VALUE_BYTES = 40
"""Memory of a decoded number or short string: the object and its place in a list."""
CONTAINER_BYTES = 200
"""Memory of a decoded object or list, without its values."""
PARALLEL_DECODES = 1
"""Large bodies that are decoded at once: each takes several times its bytes meanwhile, and the interpreter's lock."""

logger = logging.getLogger("troupellm.server")
StructT = TypeVar("StructT", bound=msgspec.Struct)

MAX_REMEMBERED = 64
"""Unknown fields that are logged."""
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names that may stand in a log line; also bounds the memory of them."""
_SAMPLING = re.compile(
    r"penalty|temperature|sampl|logit|logprob|mirostat|dry_|xtc_|dynatemp|smoothing|typical|cutoff|ngram|beam|guided|grammar|n_predict"
    r"|token|stop|seed|^(top|min|max)_|_p$"
)

_REPLACEMENT = b"fffd"
_HIGH, _LOW = re.compile(rb"[dD][89abAB][0-9a-fA-F]{2}"), re.compile(rb"[dD][c-fC-F][0-9a-fA-F]{2}")
_DIGITS = 4
"""The hexadecimal digits behind `\\u` of the two halves of a surrogate pair."""


class UnknownFields:
    """Logs each such field once, for the first 64 names."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def report(self, body: Any, kind: type[msgspec.Struct]) -> None:
        """Look at a decoded body that is about to become a `kind`."""
        if not isinstance(body, dict):
            return
        for name in body.keys() - kind.__struct_fields__:
            if name in self._logged or len(self._logged) >= MAX_REMEMBERED:
                continue
            if body[name] is not None and _FIELD.fullmatch(name) and _SAMPLING.search(name):
                self._logged.add(name)
                logger.warning("requests have a field %s, which this server does not know and ignores", name)


async def decode_body(
    raw: bytes,
    kind: type[StructT],
    unknown: UnknownFields | None = None,
    *,
    limiter: anyio.CapacityLimiter | None = None,
    reservation: Reservation | None = None,
    timeout: float = 0.0,
) -> StructT:
    """Decode into `kind`; the time is linear in the size. Fields that `kind` does not have are reported to `unknown`.

    Args:
        limiter: how many large bodies are decoded at once.
        reservation: the body's room, which takes the memory of a large body's values too.
        timeout: seconds that the body waits for that room; see `Reservation.take`.

    Raises:
        InvalidRequest: not strict JSON, too many strings, objects or lists, nested deeper than 64, a repeated key, or
            not what the API takes.
        RateLimited, HttpError: no room; see `Reservation.take`.
    """
    if len(raw) > INLINE_BYTES:
        bare: bytes | None = None
        if reservation is not None:
            bare, values = await offload(_measured, raw, limiter=limiter)
            if values > len(raw) // 8:  # a text has few
                bare = None  # it may be as large as the body, which waits
                await reservation.take(len(raw) + values, timeout)
        return await offload(decode_json, raw, kind, unknown, bare, limiter=limiter)
    return decode_json(raw, kind, unknown)


def decode_json(
    raw: bytes, kind: type[StructT], unknown: UnknownFields | None = None, bare: bytes | None = None
) -> StructT:
    """As `decode_body`, in the caller's thread. bare: `raw` without its strings, where that is known."""
    bare = _bare(raw) if bare is None else bare
    try:
        tree = _tree(raw, mend=getattr(kind, "HOLDS_CONVERSATION", False))
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = "the text is not valid UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).split(" - at")[0]
        raise invalid_json(f"the request body is not valid JSON: {text}") from None
    keys = _count_keys(tree)
    # JSON text has one colon outside strings per key, and a decoded object keeps one of equal keys.
    if keys != bare.count(b":"):
        raise invalid_json("the request body has an object with the same key twice")
    if unknown is not None and hasattr(kind, "__struct_fields__"):
        unknown.report(tree, kind)
    try:
        return msgspec.convert(tree, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind, "the request body") from None


def _tree(raw: bytes, *, mend: bool) -> Any:
    """The value of a JSON text.

    Args:
        mend: half of a surrogate pair, which no text can have, stands for U+FFFD.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is not JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        whole = _without_halves(raw) if mend else None
        if whole is None:
            raise
    return msgspec.json.decode(whole)


def _bare(raw: bytes) -> bytes:
    """The text without its strings.

    Raises:
        InvalidRequest: more strings, objects or lists than a body may have.
    """
    # Two for each string, or one where it ends with a backslash of its own; quotes inside of strings are none of them.
    if raw.count(b'"') - raw.count(b'\\"') > 2 * MAX_STRINGS:
        raise invalid_json(f"the request body has more than {MAX_STRINGS} strings")
    # Without escapes every other part between quotes is outside of strings. Each of these calls holds the interpreter's
    # lock for a few milliseconds per 8 MiB; a regular expression holds it for ten times as long, in one call.
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare = b"".join(unescaped.split(b'"')[::2])
    if bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS:
        raise invalid_json(f"the request body has more than {MAX_CONTAINERS} objects and lists")
    return bare


def _measured(raw: bytes) -> tuple[bytes, int]:
    """A JSON text without its strings, and about how many bytes of memory its values take beside its texts.

    Raises:
        InvalidRequest: as of `_bare`.
    """
    bare = _bare(raw)
    return bare, bare.count(b",") * VALUE_BYTES + (bare.count(b"[") + bare.count(b"{")) * CONTAINER_BYTES


def _count_keys(tree: Any) -> int:
    """How many keys all objects have together.

    Raises:
        InvalidRequest: nested too deeply.
    """
    keys, depth, level = 0, 0, [tree]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        deeper: list[Any] = []
        for node in level:
            if type(node) is dict:
                keys += len(node)
                deeper.extend(value for value in node.values() if type(value) in (dict, list))
            elif type(node) is list:
                deeper.extend(value for value in node if type(value) in (dict, list))
        level = deeper
    return keys


def _too_deep() -> InvalidRequest:
    return invalid_json(f"the request body is nested more than {MAX_DEPTH} levels deep")


def invalid_field(error: msgspec.ValidationError, kind: type, whole: str) -> InvalidRequest:
    """An error of decoding into `kind`, with its path as the API's `param`; `whole` is what was decoded."""
    reason, _, location = with_allowed_values(error, kind).partition(" - at ")
    path = location.rpartition("$")[2].rstrip("`").lstrip(".").removesuffix("[...]")
    missing = re.search(r"missing required field `(\w+)`", reason)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    if not path:
        return InvalidRequest(f"{whole}: {reason}", code="invalid_type")
    return InvalidRequest(f"{path}: {reason}", param=path, code="invalid_type")


def _without_halves(raw: bytes) -> bytes | None:
    """JSON text with U+FFFD in the place of each half of a surrogate pair without its other half; None where there is
    none. Linear. Some programs write such halves as escapes, and no text can hold them.
    """
    # Pairs of backslashes in another spelling: every backslash that is left begins an escape.
    pieces = raw.replace(b"\\\\", b"\\u005c").split(b"\\u")
    found = False
    place = 1
    while place < len(pieces):
        digits, rest = pieces[place][:_DIGITS], pieces[place][_DIGITS:]
        if _HIGH.fullmatch(digits):
            if not rest and place + 1 < len(pieces) and _LOW.fullmatch(pieces[place + 1][:_DIGITS]):
                place += 2
                continue
            pieces[place], found = _REPLACEMENT + rest, True
        elif _LOW.fullmatch(digits):
            pieces[place], found = _REPLACEMENT + rest, True
        place += 1
    return b"\\u".join(pieces) if found else None
