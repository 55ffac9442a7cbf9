"""Which session a request belongs to, as its client names it."""

import msgspec

from troupellm.protocol.api.chat import GenerationFields
from troupellm.protocol.config.kv_hints import RETENTION_SECONDS, KVHints
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import printable
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.ignored import skipped_names

_MOST_DIGITS = 9
RANK_HEADER = b"x-data-parallel-rank"
"""As vLLM's: pins a request to a replica."""
MAX_SESSION_ID = 512
"""Characters."""
_HEADERS = (b"x-session-id", b"x-claude-code-session-id", b"session_id", b"thread-id", b"x-session-affinity")
"""In the order in which they are looked at: any client's, Claude Code's, two of Codex, that of opencode and pi."""


class Session(msgspec.Struct, frozen=True):
    id: str | None
    """Of the key's sessions; other keys may use the same id for theirs."""
    skipped: list[str]
    """Names that cannot be one; see `skipped_names`."""


def hints_of(exchange: Exchange, request: GenerationFields) -> KVHints:
    """The KV hints in a request's fields and headers.

    Raises:
        InvalidRequest: `X-data-parallel-rank` is no number.
    """
    retain = RETENTION_SECONDS.get(request.prompt_cache_retention or "", 0.0)
    return KVHints(session=session_of(exchange, request).id or "", retain=retain, replica=replica_of(exchange))


def replica_of(exchange: Exchange) -> int | None:
    """The replica that a request's header names; None where it has none.

    Raises:
        InvalidRequest: it is no number.
    """
    named = exchange.header(RANK_HEADER)
    if named is None:
        return None
    if not (named.isascii() and named.isdecimal() and len(named) <= _MOST_DIGITS):
        text = f"X-data-parallel-rank must be the number of a replica, got {printable(named)}"
        raise InvalidRequest(text, param="X-data-parallel-rank")
    return int(named)


def session_of(exchange: Exchange, request: GenerationFields) -> Session:
    """The first name that a request gives its session; one that is empty, too long or unprintable is passed over."""
    found = [("session_id", request.session_id)]
    found += [(name.decode(), exchange.header(name)) for name in _HEADERS]
    user = None if request.metadata is None else request.metadata.get("user_id")
    found += [("prompt_cache_key", request.prompt_cache_key), ("user_id", user)]
    wrong: list[str] = []
    for place, name in found:
        if name and len(name) <= MAX_SESSION_ID and name.isprintable():
            return Session(name, skipped_names("session", wrong))
        if name:
            wrong.append(place)
    return Session(None, skipped_names("session", wrong))
