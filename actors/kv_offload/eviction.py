"""Which block leaves a full tier: what every policy answers, and finding one by its name."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from troupellm.protocol.errors import ConfigError

GROUP = "troupellm.kv_offload_policies"
"""Entry points of plug-ins: a name, and a class made as `EvictionPolicy` is."""
_BUILT_IN = {
    "lru": ("troupellm.actors.kv_offload.lru", "LruPolicy"),
    "arc": ("troupellm.actors.kv_offload.arc", "ArcPolicy"),
}

Pinned = Callable[[bytes], bool]
"""Whether a key must stay: a transfer from or to its place is under way."""


class TierFull(RuntimeError):
    """Everything in the tier is pinned."""


class EvictionPolicy(ABC):
    """Keeps at most `capacity` keys, which it orders; what they name lies elsewhere."""

    def __init__(self, capacity: int) -> None:
        """capacity: at least 1."""
        self.capacity = capacity

    @abstractmethod
    def __contains__(self, key: bytes) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def admit(self, key: bytes, pinned: Pinned) -> bytes | None:
        """Take in a key that is not here; the key that gives way to it, if one must.

        Raises:
            TierFull: all that could give way is pinned; nothing has changed.
        """

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """A key that is here was of use."""

    @abstractmethod
    def refresh(self, key: bytes) -> None:
        """Keep a key longer than those not refreshed since, although no request has asked for it."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a key that is here."""


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """A policy by its name: lru, arc, or that of a plug-in.

    Raises:
        ConfigError: the name is unknown, or the plug-in is no policy.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        made = getattr(import_module(module), attribute)(capacity)
    else:
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points:
            known = ", ".join(sorted({*_BUILT_IN, *points}))
            raise ConfigError(f"kv_offload_policy: there is no {name}; there are {known}", param="kv_offload_policy")
        made = points[name].load()(capacity)
    if not isinstance(made, EvictionPolicy):
        raise ConfigError(f"kv_offload_policy: {name} is no EvictionPolicy", param="kv_offload_policy")
    return made
