"""Compares the measured cost of bringing a block back with that of computing it again."""

from collections.abc import Callable
from typing import Literal

PreemptionMode = Literal["auto", "recompute", "offload"]
_WEIGHT = 0.1
"""Of the newest transfer in the averages."""
_FORGETS = 0.99
_WORTH = 0.8
"""Moving must take this much less than computing, since it takes an admission of its own."""


def fetch_from(tier: int) -> str:
    """The kind of transfer that brings blocks of an outer tier to host memory."""
    return f"fetch {tier}"


class Cost:
    """Times are seconds."""

    def __init__(self, mode: PreemptionMode, block_size: int, num_groups: int, per_token: Callable[[], float]) -> None:
        """per_token: what a token of a prompt takes to compute; 0 is unknown."""
        self.mode = mode
        self._block_size = block_size
        self._num_groups = num_groups
        self._per_token = per_token
        self._moved: dict[str, float] = {}
        """Per block, by kind of transfer."""

    def learn(self, kind: str, seconds: float) -> None:
        """A block was moved."""
        if seconds > 0.0:
            known = self._moved.get(kind)
            self._moved[kind] = seconds if known is None else known + _WEIGHT * (seconds - known)

    def load_pays(self) -> bool:
        """Blocks that host memory has come back sooner than they are computed."""
        return self.mode == "offload" or self._pays("load")

    def fetch_pays(self, tier: int) -> bool:
        """Blocks that an outer tier has come back sooner than they are computed."""
        return self.mode == "offload" or self._pays(fetch_from(tier), "load")

    def computing(self, num_blocks: int) -> float:
        """Seconds that computing so many blocks of a prompt takes; 0 is unknown."""
        return num_blocks * self._block_size * self._per_token()

    def offload_pays(self) -> bool:
        """A preempted sequence's blocks should go to host memory, to come back from there."""
        return self.mode == "offload" or (self.mode == "auto" and self._pays("store", "load"))

    def _pays(self, *kinds: str) -> bool:
        moving = sum(self._moved.get(kind, 0.0) for kind in kinds) * self._num_groups
        computing = self._per_token() * self._block_size
        return not computing or moving <= _WORTH * computing

    def not_done(self, *kinds: str) -> None:
        """Lower the estimates of transfers that are not done and so not measured: in time they are tried again. Call it
        once per occasion."""
        for kind in self._moved.keys() & kinds:
            self._moved[kind] *= _FORGETS
