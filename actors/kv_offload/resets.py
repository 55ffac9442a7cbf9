"""Outer tiers that are to forget what they hold.

A reset is a transfer like others, in their order: what is asked of the tier after it finds nothing older. A tier that
could not be reset (it is sick, or its worker died meanwhile) is not used before it has been.
"""

from collections.abc import Callable, Iterable
from functools import partial

from troupellm.actors.kv_offload.transfers import Transfers
from troupellm.protocol.messages.kv_transfers import TransferDone
from troupellm.protocol.messages.worker import NULL_BLOCK

OnDone = Callable[[bool], None]
MOST_CALLS = 64
"""Callers that may wait for one tier."""


class Resets:
    def __init__(self, transfers: Transfers, changed: Callable[[], None]) -> None:
        """changed: hears that `owed` is another."""
        self._transfers = transfers
        self._changed = changed
        self._under_way: dict[int, list[OnDone]] = {}
        """By tier, who waits for the reset that is under way."""
        self._next: dict[int, list[OnDone]] = {}
        """For the one after it."""
        self.owed: set[int] = set()
        """Tiers whose last reset failed."""

    def __len__(self) -> int:
        """Under way."""
        return len(self._under_way)

    @property
    def tiers(self) -> Iterable[int]:
        """Those that are being reset."""
        return self._under_way.keys()

    def begin(self, tiers: Iterable[int], done: OnDone) -> None:
        """Reset these tiers; `done` hears whether all could be."""
        left, went_well = set(tiers), True
        if not left:
            done(True)
            return

        def on_done(tier: int, ok: bool) -> None:
            nonlocal went_well
            left.remove(tier)
            went_well = went_well and ok
            if not left:
                done(went_well)

        for tier in sorted(left):
            self._ask(tier, partial(on_done, tier))

    def retry(self, works: Callable[[int], bool]) -> None:
        """Try tiers again that are owed a reset and work now."""
        for tier in [tier for tier in self.owed if works(tier)]:
            self.owed.remove(tier)
            self._ask(tier, None)
            self._changed()

    def forget(self) -> None:
        """The worker is gone, and with it every transfer: their results are unknown."""
        self.answer(False)
        self.owed.update(self._under_way)
        self._under_way.clear()
        self._next.clear()
        self._changed()

    def answer(self, ok: bool) -> None:
        """End every wait with the result `ok`."""
        waiting = [callback for on_done in (*self._under_way.values(), *self._next.values()) for callback in on_done]
        for on_done in (*self._under_way.values(), *self._next.values()):
            on_done.clear()
        for callback in waiting:
            callback(ok)

    def _ask(self, tier: int, on_done: OnDone | None) -> None:
        if tier in self._under_way:
            waiting = self._next.setdefault(tier, [])
            if on_done is not None and len(waiting) < MOST_CALLS:
                waiting.append(on_done)
            elif on_done is not None:
                on_done(False)
            return
        self._begin(tier, [] if on_done is None else [on_done])

    def _begin(self, tier: int, on_done: list[OnDone]) -> None:
        self._under_way[tier] = on_done

        def answered(answer: TransferDone) -> None:
            waiting = self._under_way.pop(tier)
            if answer.ok == (tier in self.owed):
                self.owed ^= {tier}
                self._changed()
            for callback in waiting:
                callback(answer.ok)
            later = self._next.pop(tier, None)
            if later is not None:
                self._begin(tier, later)

        self._transfers.begin("reset", answered, place=NULL_BLOCK, key=b"", group=0, block=NULL_BLOCK, tier=tier)
