"""Compiled guides, and refusals, by what was asked for: bounded in bytes, the least recently used leave first."""

from collections import OrderedDict
from math import inf
from sys import getsizeof
from typing import Generic, TypeVar

import msgspec

from troupellm.protocol.params.guide import GuideProgram, GuideSpec

_OVERHEAD = 512
"""Bytes of an entry beside its texts."""
_MOST_REFUSALS = 0.25
"""Refusals may take so much of the whole: a flood of nonsense leaves what is good."""


class GuideKey(msgspec.Struct, frozen=True):
    """The key of a compiled guide. The request's own name for the guide is no part of it."""

    spec: GuideSpec
    backend: str
    tenant: str = ""
    """The tenant. A shared entry would tell other tenants, by the speed of its answer, that the guide was compiled
    before."""


def key_of(spec: GuideSpec, backend: str, tenant: str = "") -> GuideKey:
    return GuideKey(msgspec.structs.replace(spec, field="", backend=""), backend, tenant)


ValueT = TypeVar("ValueT")


class GuideCache:
    def __init__(self, capacity: int) -> None:
        """capacity: bytes."""
        self._programs: _Lru[GuideProgram] = _Lru(capacity)
        self._refusals: _Lru[tuple[str, float]] = _Lru(int(capacity * _MOST_REFUSALS))
        """Until when they hold, too."""

    @property
    def num_bytes(self) -> int:
        return self._programs.num_bytes + self._refusals.num_bytes

    @property
    def evicted(self) -> int:
        return self._programs.evicted + self._refusals.evicted

    def __len__(self) -> int:
        return len(self._programs.entries) + len(self._refusals.entries)

    def program(self, key: GuideKey) -> GuideProgram | None:
        return self._programs.find(key)

    def refusal(self, key: GuideKey, now: float) -> str | None:
        known = self._refusals.find(key)
        if known is None:
            return None
        message, until = known
        if now < until:
            return message
        self._refusals.drop(key)
        return None

    def keep(self, key: GuideKey, program: GuideProgram) -> None:
        self._programs.keep(key, program, _size(key, program.text))

    def keep_refusal(self, key: GuideKey, message: str, until: float = inf) -> None:
        """until: on the clock of `refusal`."""
        self._refusals.keep(key, (message, until), _size(key, message))


def _size(key: GuideKey, text: str) -> int:
    """Bytes of the client's own texts and of `text`; one wide character makes all of its text wide."""
    return sum(map(getsizeof, (key.spec.source, key.spec.whitespace_pattern, text)))


class _Lru(Generic[ValueT]):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.entries: OrderedDict[GuideKey, tuple[ValueT, int]] = OrderedDict()
        self.num_bytes = 0
        self.evicted = 0

    def find(self, key: GuideKey) -> ValueT | None:
        entry = self.entries.get(key)
        if entry is None:
            return None
        self.entries.move_to_end(key)
        return entry[0]

    def drop(self, key: GuideKey) -> None:
        """Remove an entry that is in the cache."""
        _, freed = self.entries.pop(key)
        self.num_bytes -= freed

    def keep(self, key: GuideKey, value: ValueT, num_bytes: int) -> None:
        """Add an entry, unless it is larger than the whole cache or already there."""
        num_bytes += _OVERHEAD
        if num_bytes > self._capacity or key in self.entries:
            return
        self.entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._capacity:
            _, (_, freed) = self.entries.popitem(last=False)
            self.num_bytes -= freed
            self.evicted += 1
