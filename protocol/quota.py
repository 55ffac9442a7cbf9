"""The rest of an API key's limits, for the headers of an answer."""

import msgspec


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """None where there is no such limit. A limit of so many per minute fills up again evenly, up to the whole."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests: float | None = None
    """Seconds until all of them are there again."""
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens: float | None = None
    limit_concurrency: int | None = None
    remaining_concurrency: int | None = None
