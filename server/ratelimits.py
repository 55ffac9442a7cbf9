"""What a key may still use, as the headers that OpenAI's API has for it."""

from troupellm.protocol.quota import Quota


def duration(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1.5s`, `6m0s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{text}s" if minutes else f"{text}s"


def ratelimit_headers(quota: Quota | None) -> tuple[tuple[bytes, bytes], ...]:
    """One triple per limit that there is."""
    if quota is None:
        return ()
    shown: dict[str, str] = {}
    for kind, limit, remaining, reset in (
        ("requests", quota.limit_requests, quota.remaining_requests, quota.reset_requests),
        ("tokens", quota.limit_tokens, quota.remaining_tokens, quota.reset_tokens),
    ):
        if limit is not None:
            shown[f"limit-{kind}"] = str(limit)
            shown[f"remaining-{kind}"] = str(remaining)
            shown[f"reset-{kind}"] = duration(reset or 0.0)
    if quota.limit_concurrency is not None:
        shown["limit-concurrency"] = str(quota.limit_concurrency)
        shown["remaining-concurrency"] = str(quota.remaining_concurrency)
    return tuple((f"x-ratelimit-{name}".encode(), value.encode()) for name, value in shown.items())
