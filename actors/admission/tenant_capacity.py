"""A capacity that several tenants share: each has a reserved part, and the rest is open to all."""

from collections.abc import Mapping

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
