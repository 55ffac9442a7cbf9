"""The header `X-data-parallel-rank`, as vLLM's: it pins a request to a replica."""

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import printable
from troupellm.server.base.exchange import Exchange

HEADER = b"x-data-parallel-rank"
_MOST_DIGITS = 9


def replica_of(exchange: Exchange) -> int | None:
    """The replica that a request's header names; None where it has none.

    Raises:
        InvalidRequest: it is no number.
    """
    named = exchange.header(HEADER)
    if named is None:
        return None
    if not (named.isascii() and named.isdecimal() and len(named) <= _MOST_DIGITS):
        text = f"X-data-parallel-rank must be the number of a replica, got {printable(named)}"
        raise InvalidRequest(text, param="X-data-parallel-rank")
    return int(named)
