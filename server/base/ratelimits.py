"""The rest of a key's limits, as headers of OpenAI's API."""

import math
import time

from troupellm.protocol.quota import Quota


def duration(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1.5s`, `6m0s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{text}s" if minutes else f"{text}s"


def ratelimit_headers(quota: Quota | None, *, anthropic: bool = False) -> tuple[tuple[bytes, bytes], ...]:
    """One triple per limit that there is.

    Args:
        anthropic: the same under the names of Anthropic's API too, where a reset is a time of day.
    """
    if quota is None:
        return ()
    shown: dict[str, str] = {}
    theirs: dict[str, str] = {}
    for kind, limit, remaining, reset in (
        ("requests", quota.limit_requests, quota.remaining_requests, quota.reset_requests),
        ("tokens", quota.limit_tokens, quota.remaining_tokens, quota.reset_tokens),
    ):
        if limit is not None:
            shown[f"limit-{kind}"] = str(limit)
            shown[f"remaining-{kind}"] = str(remaining)
            shown[f"reset-{kind}"] = duration(reset or 0.0)
            theirs[f"{kind}-limit"] = str(limit)
            theirs[f"{kind}-remaining"] = str(remaining)
            theirs[f"{kind}-reset"] = _time_in(reset or 0.0)
    if quota.limit_concurrency is not None:
        shown["limit-concurrency"] = str(quota.limit_concurrency)
        shown["remaining-concurrency"] = str(quota.remaining_concurrency)
    headers = [(f"x-ratelimit-{name}".encode(), value.encode()) for name, value in shown.items()]
    if anthropic:
        headers += [(f"anthropic-ratelimit-{name}".encode(), value.encode()) for name, value in theirs.items()]
    return tuple(headers)


def _time_in(seconds: float) -> str:
    """The time after so many seconds, as RFC 3339 writes it; full seconds, never too early."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(math.ceil(time.time() + seconds)))
