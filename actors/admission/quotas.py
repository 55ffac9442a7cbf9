"""The limits of each tenant, per minute and at once, and how much of them it has used; and capacity that tenants share.

A limit per minute is a bucket that holds a minute's worth and fills evenly. Tokens are taken when a request comes, an
estimate of its prompt and what it may generate, and put right when it has ended: then exactly what its usage says was
charged, also for an output that was not read. Tokens generated after a stop string cost nothing. A request for more
than a bucket holds waits for a full one and leaves it in debt, so that no prompt is too long to be served at all.
Nothing of these limits is shared between tenants. Of a shared capacity (`TenantCapacity`) each tenant has a reserved
part, and the rest is open to all.
"""

import math
from collections.abc import Mapping, Sequence

from troupellm.actors.runtime.ports import Clock
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.errors import InvalidRequest, RateLimited
from troupellm.protocol.messages.snapshot import TenantSnapshot
from troupellm.protocol.quota import Quota

_KEPT_SHARE = 0.5
"""Part of the capacity that is kept for tenants, by weight, as far as they do not use it."""


class TenantCapacity:
    """Of sequences, or of tokens. A tenant whose name is not known has the common part only."""

    def __init__(self, capacity: int, weights: Mapping[str, float]) -> None:
        self.capacity = capacity
        self.used = 0
        self._used: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        if 1 < len(weights) <= capacity * _KEPT_SHARE:
            total = sum(weights.values())
            self._kept = {
                name: max(1, int(_KEPT_SHARE * capacity * weight / total)) for name, weight in weights.items()
            }
        self._all_kept = sum(self._kept.values())
        self._free_kept = self._all_kept
        """The reserved capacity that is not used."""

    def fits(self, tenant: str, amount: int, *, kept_only: bool = False) -> bool:
        """True if there is room. An amount larger than the whole capacity fits when the capacity is empty.

        A tenant's reserved part stays available to it even if other tenants turn out to need more than was estimated.

        Args:
            kept_only: use only the reserved part, since another request waits for the shared part.
        """
        own = self._own(tenant)
        if kept_only:
            return amount <= own
        return not self.used or amount <= own or self.used + amount <= self.capacity - self._free_kept + own

    def may_fit(self, tenant: str, amount: int) -> bool:
        """True if the amount fits once the shared part is free, however much others use of their reserved parts."""
        return amount <= self.capacity - self._all_kept + self._kept.get(tenant, 0)

    def usage(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def change(self, tenant: str, amount: int) -> None:
        """Take room, or with a negative amount give it back."""
        self._free_kept -= self._own(tenant)
        used = self.usage(tenant) + amount
        if used:
            self._used[tenant] = used
        else:
            self._used.pop(tenant, None)
        self.used += amount
        self._free_kept += self._own(tenant)

    def _own(self, tenant: str) -> int:
        """The part that is reserved for a tenant and not used."""
        return max(0, self._kept.get(tenant, 0) - self.usage(tenant))


_MINUTE = 60.0


class _Bucket:
    """`limit` per minute."""

    __slots__ = ("_at", "_clock", "_level", "limit")

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock.now()

    @property
    def level(self) -> float:
        """Tokens that can be taken now; negative is debt."""
        now = self._clock.now()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / _MINUTE)
        self._at = now
        return self._level

    def seconds_until(self, level: float) -> float:
        return max(0.0, (min(level, self.limit) - self.level) * _MINUTE / self.limit)

    def take(self, amount: float) -> None:
        """Negative amounts are given back."""
        self._level = min(self.limit, self.level - amount)


def wait_text(seconds: float) -> str:
    """Seconds as `1.2s`, the form that clients search a message for; never less than it takes."""
    return f"{max(1, math.ceil(round(seconds * 10, 3))) / 10:g}s"


class _Account:
    """One tenant's."""

    def __init__(self, config: TenantConfig, clock: Clock) -> None:
        self.config = config
        per_minute = config.requests_per_minute, config.tokens_per_minute
        self.requests, self.tokens = (None if limit is None else _Bucket(limit, clock) for limit in per_minute)
        self.inside = 0
        self.num_requests = 0
        self.num_limited = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def fits(self, sequences: int) -> bool:
        most = self.config.max_concurrency
        return most is None or self.inside + sequences <= most

    def check(self, requests: int, sequences: int, tokens: int, *, field: str) -> None:
        """
        Raises:
            InvalidRequest: it asks for more sequences than the tenant may ever have at once.
            RateLimited: a limit is reached.
        """
        most = self.config.max_concurrency
        if most is not None and sequences > most:
            text = f"{field}: the request has {sequences} sequences; this API key may have {most} at once"
            raise InvalidRequest(text, param=field, code="integer_above_max_value")
        wait, what = 0.0, ""
        for bucket, amount, name in ((self.requests, requests, "requests"), (self.tokens, tokens, "tokens")):
            if bucket is not None and amount:
                seconds = bucket.seconds_until(amount)
                if seconds > wait:
                    wait, what = seconds, f"{bucket.limit} {name} per minute"
        if not wait and not self.fits(sequences):
            wait, what = 1.0, f"{self.config.max_concurrency} sequences at once"
        if wait:
            self.num_limited += 1
            text = f"the limit of this API key is reached: {what}. Please try again in {wait_text(wait)}."
            raise RateLimited(text, retry_after=wait, quota=self.quota())

    def quota(self) -> Quota:
        requests, tokens, most = self.requests, self.tokens, self.config.max_concurrency
        return Quota(
            limit_requests=None if requests is None else requests.limit,
            remaining_requests=None if requests is None else max(0, int(requests.level)),
            reset_requests=None if requests is None else requests.seconds_until(requests.limit),
            limit_tokens=None if tokens is None else tokens.limit,
            remaining_tokens=None if tokens is None else max(0, int(tokens.level)),
            reset_tokens=None if tokens is None else tokens.seconds_until(tokens.limit),
            limit_concurrency=most,
            remaining_concurrency=None if most is None else max(0, most - self.inside),
        )


class Quotas:
    """Accounts of the tenants in the configuration. Others are neither limited nor counted."""

    def __init__(self, tenants: Sequence[TenantConfig], clock: Clock) -> None:
        self._accounts = {tenant.name: _Account(tenant, clock) for tenant in tenants}

    def fits(self, tenant: str, sequences: int) -> bool:
        """Whether a tenant may have so many more sequences inside."""
        account = self._accounts.get(tenant)
        return account is None or account.fits(sequences)

    def check(self, tenant: str, *, requests: int, sequences: int, tokens: int, field: str = "n") -> None:
        """
        Args:
            field: of the request, which says how many sequences it has.

        Raises:
            InvalidRequest: the request has more sequences than the tenant may ever have at once.
            RateLimited: the tenant has reached a limit; nothing was taken.
        """
        account = self._accounts.get(tenant)
        if account is not None:
            account.check(requests, sequences, tokens, field=field)

    def take(self, tenant: str, *, requests: int, sequences: int, tokens: int) -> Quota | None:
        """Charge a request without regard to the limits. Returns the remaining limits, or None for a tenant without an
        account."""
        account = self._accounts.get(tenant)
        if account is None:
            return None
        account.inside += sequences
        account.num_requests += requests
        if account.requests is not None:
            account.requests.take(requests)
        if account.tokens is not None:
            account.tokens.take(tokens)
        return account.quota()

    def change(self, tenant: str, *, tokens: int, requests: int = 0) -> None:
        """A charge was wrong by so many tokens and requests."""
        account = self._accounts.get(tenant)
        if account is None:
            return
        account.num_requests += requests
        if account.requests is not None:
            account.requests.take(requests)
        if account.tokens is not None:
            account.tokens.take(tokens)

    def leave(self, tenant: str, sequences: int) -> None:
        account = self._accounts.get(tenant)
        if account is not None:
            account.inside -= sequences

    def settle(self, tenant: str, *, taken: int, prompt_tokens: int, completion_tokens: int) -> None:
        """A request for which `taken` tokens were taken has ended and has used so many."""
        self.change(tenant, tokens=prompt_tokens + completion_tokens - taken)
        account = self._accounts.get(tenant)
        if account is not None:
            account.prompt_tokens += prompt_tokens
            account.completion_tokens += completion_tokens

    def snapshot(self) -> tuple[TenantSnapshot, ...]:
        return tuple(
            TenantSnapshot(
                name=name,
                inside=account.inside,
                requests=account.num_requests,
                limited=account.num_limited,
                prompt_tokens=account.prompt_tokens,
                completion_tokens=account.completion_tokens,
            )
            for name, account in self._accounts.items()
        )
