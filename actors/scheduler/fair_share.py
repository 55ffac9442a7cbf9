"""Fair shares: a virtual token counter per tenant.

A tenant's counter grows with the tokens that it is served, divided by its weight: a prompt's tokens when it starts, and
a token for each of its running sequences in every step. The tenant with the smallest counter is served next, so tenants
that want more than there is get equal parts, however many requests they send. A tenant that comes back after a rest
starts level with the least served one: idle time earns it nothing. ("Fairness in Serving Large Language Models", OSDI
2024.)

A sequence that asks outer tiers has had its turn, and what it will compute is known when it comes back. Until then the
tenant counts as served what the sequence would compute without them.
"""

from collections.abc import Iterable, Mapping

_GENERATED_COST = 2.0
"""A generated token takes a step of its own, a prompt's tokens share one."""
_HEAD_START = 1.0
"""Virtual tokens by which who comes after a rest goes before those who are level with it."""
_MOST_REMEMBERED = 4096
"""Counters of tenants who have nothing open; beyond this the smallest, which matter least, are forgotten."""


class FairShare:
    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """weights: of the tenants whose weight is not 1."""
        self._weights = dict(weights or {})
        self._served: dict[str, float] = {}
        self._promised: dict[str, int] = {}
        """Tokens of prompts, of those tenants who wait for outer tiers."""
        self._rows: dict[str, int] = {}
        """Running sequences, of those tenants who have any."""

    @property
    def running(self) -> Mapping[str, int]:
        """Running sequences by tenant."""
        return self._rows

    def served(self, tenant: str) -> float:
        """Virtual tokens. Comparable between tenants, grows but where a promise ends."""
        served = self._served.get(tenant, 0.0)
        return served + self._promised[tenant] / self._weights.get(tenant, 1.0) if tenant in self._promised else served

    def rows(self, tenant: str) -> float:
        """Running sequences over the tenant's weight."""
        return self._rows.get(tenant, 0) / self._weights.get(tenant, 1.0)

    def row_share(self, tenant: str) -> float:
        """The amount that one sequence adds to `rows`."""
        return 1.0 / self._weights.get(tenant, 1.0)

    def arrive(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant with nothing waiting or running asks for something. Promises of the others may come to nothing, and
        do not count."""
        others = [self._served.get(other, 0.0) for other in {*self._rows, *waiting} if other != tenant]
        if others:
            self._served[tenant] = max(self._served.get(tenant, 0.0), min(others) - _HEAD_START)
        if len(self._served) > _MOST_REMEMBERED:  # a tenant that comes alone gets its counter when it is charged
            self._forget({tenant, *self._rows, *waiting})

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens of a prompt are computed for a tenant."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def promise(self, tenant: str, tokens: int) -> None:
        """So many tokens of a prompt may have to be computed for a tenant; less than none: that is decided."""
        promised = self._promised.get(tenant, 0) + tokens
        if promised:
            self._promised[tenant] = promised
        else:
            self._promised.pop(tenant, None)

    def charge_generated(self, tenant: str, tokens: int) -> None:
        """So many tokens came beyond the one that each of its sequences is charged for in every step."""
        cost = _GENERATED_COST * tokens / self._weights.get(tenant, 1.0)
        self._served[tenant] = self._served.get(tenant, 0.0) + cost

    def charge_step(self) -> None:
        """Every running sequence gets a token; O(tenants), not O(sequences)."""
        for tenant, rows in self._rows.items():
            cost = _GENERATED_COST * rows / self._weights.get(tenant, 1.0)
            self._served[tenant] = self._served.get(tenant, 0.0) + cost

    def runs(self, tenant: str) -> None:
        """One more sequence of a tenant runs."""
        self._rows[tenant] = self._rows.get(tenant, 0) + 1

    def rests(self, tenant: str) -> None:
        """One of its running sequences does not any more."""
        left = self._rows[tenant] - 1
        if left:
            self._rows[tenant] = left
        else:
            del self._rows[tenant]

    def _forget(self, kept: set[str]) -> None:
        idle = sorted((served, tenant) for tenant, served in self._served.items() if tenant not in kept)
        for _, tenant in idle[: max(1, len(idle) // 2)] if idle else ():
            del self._served[tenant]
