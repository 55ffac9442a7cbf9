"""Counts down the rests of a `DraftLength` as a speculator does: it is asked again when one is over, or cut short."""

from troupellm.models.speculation.draft_length import DraftLength


class CountedRests:
    def __init__(self, length: DraftLength) -> None:
        self._length = length
        self._left, self._rows, self._resting = 0, 0, False

    def add_row(self, slot: int) -> None:
        """There is another row in a slot: a rest is over."""
        self._length.add_row(slot)
        self._rows = 0

    def rests(self, rows: int, moment: float, *, mixed: bool = False) -> bool:
        """True if the coming step has no drafts."""
        if self._left and rows == self._rows:
            self._left -= 1
            return True
        steps = self._length.rests(rows, moment, mixed=mixed, left=self._left)
        self._left, self._rows, self._resting = max(0, steps - 1), rows, steps > 0
        return self._resting
