"""Turns drafting off while it does not pay, by wall-clock comparison with steps without drafts.

Per-row cost estimates err: they miss the bookkeeping of drafts, the host's work for them, and their effect on other
programs. So a stretch (a window of steps in which rows may draft) is compared with steps of as many rows that neither
draft nor measure: how long would those have taken for the same tokens? If the stretch was not faster, or no row is
worth a draft, all drafting sleeps. The sleep is longer the more the try has cost, so that all tries together cost a
small share of the time.
"""

from collections import deque
from statistics import median
from typing import Final

from troupellm.models.speculation.cost_curve import rounded

_PLAIN_WANTED: Final = 4
"""Steps without drafts that are measured before any row drafts, and again after `_STALE_STEPS`."""
_MOST_WAITING, _NEXT_WAITING = 24, 280
"""Steps that this measurement may take where prompts get in between, and the number after which it is tried again."""
_STALE_STEPS, _MOST_STALE_STEPS = 32, 256
"""The first time, when a machine is seldom at its usual speed, and later."""
_REMEMBERED: Final = 24
"""Number of latest steps without drafts that count."""
_OUTLIER: Final = 2.5
"""Multiple of the median at which a step's time is capped: other programs had the processor."""
_VERDICTS: Final = {4: 0.6, 8: 0.75, 16: 0.9}
"""After this many steps, the share of a whole stretch's required speed below which the stretch ends."""
_STRETCH: Final = 32
"""Steps of a whole stretch."""
_FEW_ROWS: Final = 4
_WORTH, _WORTH_OF_MANY = 1.0, 1.2
"""Multiple of the speed without drafts that a whole stretch must reach. Many rows share a step's fixed cost. Drafting
rows end before the others, whose steps stay as many and then have fewer rows to share the cost."""
_LOOK: Final = 16
"""Steps in which some row must have been worth a draft."""
_QUIET: Final = 8
"""Steps without a row worth a draft, after some with one, before drafting sleeps."""
_LOST_SHARE, _LEAST_LOST_SHARE = 0.0015, 0.001
"""Share of the time for tries that fail: for the first, and for those that follow one. With few rows, whose texts
differ more from one time to the next, the share is doubled."""
_LEAST_LOST, _LEAST_LOST_OF_MANY, _MOST_LOST = 0.25, 2.0, 8.0
"""Cost of a try for that purpose, in steps without drafts. Among many rows there is always one with a prompt, and such
steps are not measured."""
_HASTE, _HASTE_OF_MANY = 2, 4
"""A new row may have another kind of text, so it is tried after this fraction of the sleep. With few rows a sleep lasts
only a handful of answers, so that many answers would begin with a try."""
_HESITATION: Final = 64
"""Steps before the first try with fewer rows than those with which drafts do not pay."""
_NAP: Final = 16
"""Steps of sleep after which drafts that have paid before, or were never tried, are tried again. The proposer follows
the rows meanwhile."""
_MEASURED_EACH: Final = 32
"""In a long sleep one step of this many is measured; before its end, each of this many steps is."""
_MOST_CREDIT: Final = 2
"""Most consecutive successes that count."""


class OnOffController:
    """The state of one proposer. Calls come from the worker's thread: `rests` at the beginning of each step, then
    `drafts` and `gained` for steps that do not rest.

    Attributes:
        woke: a sleep has ended with the step under way: all rows are to be tried.
    """

    def __init__(self) -> None:
        self.woke = False
        self._plain: dict[int, _Periods] = {}
        """By rounded number of rows."""
        self._spells: dict[int, _Measured] = {}
        """By number of rows, rounded up to a power of two."""
        self._last: tuple[float, int, bool] | None = None
        """Beginning, number of rows, and rest of the step before; None if it is no measurement."""
        self._gained = 0
        self._fresh = False

    def add_row(self) -> None:
        """There is a new row in the coming step."""
        self._fresh = True
        if self._last is not None and self._last[1] <= _FEW_ROWS:  # perhaps there was nothing to do meanwhile
            self._last = None

    def rests(self, rows: int, moment: float, *, mixed: bool) -> bool:
        """True if no row drafts in the coming step.

        Args:
            rows: of the step.
            moment: wall-clock seconds.
            mixed: some rows compute more than one position.
        """
        self._settle(moment)
        measured = self._measured(rows)
        self.woke = bool(measured.left) and measured.step(new_row=self._fresh)
        rests = bool(measured.left) or (not self.woke and self._compares(measured, rows))
        self._fresh, self._gained = False, 0
        self._last = None if mixed else (moment, rows, rests)
        return rests

    def passes(self, rows: int) -> bool:
        """True if no row drafts in the coming step and it is not measured: then `rests` is not called for it."""
        measured = self._spells.get(1 << (rows - 1).bit_length())
        if measured is None or not measured.unseen or self._fresh:
            return False
        if self._last is not None and not self._last[2]:  # the outcome of that step is to be measured
            return False
        measured.left -= 1
        self._last = None
        return True

    def asleep(self, rows: int) -> bool:
        """True if no row will draft for long."""
        measured = self._measured(rows)
        return bool(measured.left) and not measured.short_sleep

    def drafts(self, rows: int, *, worth: bool, tried: bool) -> None:
        """Note the drafts of the step under way.

        Args:
            worth: some row is worth a draft, tries not counted.
            tried: all rows that were to be tried have been measured enough.
        """
        self._measured(rows).drafts(worth=worth, tried=tried)

    def gained(self, tokens: int) -> None:
        """Beyond one of each row, in the step under way."""
        self._gained += tokens

    def _measured(self, rows: int) -> "_Measured":
        size = 1 << (rows - 1).bit_length()
        found = self._spells.get(size)
        if found is None:
            found = _Measured(few=rows <= _FEW_ROWS)
            fewer = max((other for other in self._spells if other < size), default=size)
            more = min((other for other in self._spells if other > size), default=size)
            # Drafts that do not pay with fewer rows do not pay with more.
            if fewer < size and self._spells[fewer].left:
                found.inherit(self._spells[fewer])
            elif more > size and self._spells[more].left:
                found.sleep(_HESITATION)
            self._spells[size] = found
        return found

    def _settle(self, moment: float) -> None:
        """Take in the step that has ended."""
        if self._last is None:
            return
        began, rows, rested = self._last
        period, size = moment - began, rounded(rows)
        if rested:
            self._periods(size).learn(period)
            return
        # Of a crowd that scatters, no size lasts long enough.
        known = [other for other, plain in self._plain.items() if plain.seen]
        if known:
            plain = self._plain[min(known, key=lambda other: abs(other - size))]
            self._measured(rows).learn(period, plain.mean, 1 + self._gained / rows)

    def _periods(self, size: int) -> "_Periods":
        found = self._plain.get(size)
        if found is None:
            found = self._plain[size] = _Periods()
        return found

    def _compares(self, measured: "_Measured", rows: int) -> bool:
        """True if the coming step is to have no drafts although drafting is awake, for comparison."""
        plain = self._periods(rounded(rows))
        if measured.awake > measured.stale:
            measured.awake, measured.stale, plain.seen = 0, min(2 * measured.stale, _MOST_STALE_STEPS), 0
        if plain.seen >= _PLAIN_WANTED:
            measured.waited = 0
            return False
        measured.waited = (measured.waited + 1) % _NEXT_WAITING
        return measured.waited <= _MOST_WAITING


class _Periods:
    """How long steps took, by the wall.

    Attributes:
        seen: how many, since they were last called stale.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._known: deque[float] = deque(maxlen=_REMEMBERED)

    def learn(self, period: float) -> None:
        if not self.seen:
            self._known.clear()
        self.seen += 1
        self._known.append(period)

    @property
    def mean(self) -> float:
        """The mean, without disturbances of single steps."""
        return _mean(self._known)


class _Measured:
    """The state of drafting, awake or asleep, for one range of the number of rows.

    Attributes:
        left: steps of sleep to come; 0 is awake.
        naps: the sleep is short.
        awake: steps since the last comparison with steps without drafts.
        stale: value of `awake` at which steps without drafts are measured again.
        waited: steps since that measurement began.
        look: coming steps in which some row must be worth a draft.
    """

    def __init__(self, *, few: bool) -> None:
        """few: rows."""
        self._worth, self._share = (_WORTH, 2.0) if few else (_WORTH_OF_MANY, 1.0)
        self._part = _HASTE if few else _HASTE_OF_MANY
        self._least_lost = _LEAST_LOST if few else _LEAST_LOST_OF_MANY
        self.left, self.short_sleep, self.look = 0, False, _LOOK
        self.awake, self.stale, self.waited = 0, _STALE_STEPS, 0
        self._haste = 0
        """A new row ends the sleep if at most this many steps are left of it."""
        self._fails = self._quiet = 0
        self._credit = 1  # first steps of a kind take long
        self._periods: list[float] = []
        self._earned = 0.0
        """Seconds that the stretch's tokens would have taken without drafts, summed by step, since its rows change."""
        self._plain = 0.0
        self._lost = 0.0
        """Seconds since a row was last worth a draft."""

    def inherit(self, other: "_Measured") -> None:
        """Begin in the state of another one."""
        self.left, self._haste, self._fails = other.left, other._haste, other._fails

    def sleep(self, steps: int) -> None:
        """Begin to sleep."""
        self.left, self._haste = steps, steps - steps // self._part

    @property
    def unseen(self) -> bool:
        """The coming step need not be measured. Those before a sleep may end are, and of the others a few."""
        left, each = self.left, _MEASURED_EACH
        return left > each and abs(left - self._haste) > each and left % each > 1

    def step(self, *, new_row: bool) -> bool:
        """Sleep one step further; whether that was the last one."""
        self.left -= 1
        if self.left and not (new_row and self.left <= self._haste):
            return False
        self.left, self.look, self._quiet, self._lost = 0, _LOOK, 0, 0.0
        self._forget()
        return True

    def drafts(self, *, worth: bool, tried: bool) -> None:
        """As `OnOffController.drafts`."""
        if self.left:
            return
        if worth:
            self._quiet = self.look = 0
            return
        if self.look:
            self.look = 0 if tried else self.look - 1
            fails = not self.look
        else:
            self._quiet += 1
            fails = self._quiet >= _QUIET
        if fails:
            self._fail()

    def learn(self, period: float, plain: float, tokens: float) -> None:
        """A step in which rows might draft.

        Args:
            plain: how long one takes in which they may not.
            tokens: per row.
        """
        if self.left:
            return
        self.awake += 1
        self._plain = plain
        self._lost += min(period, _OUTLIER * _OUTLIER * plain) - plain * tokens
        self._periods.append(period)
        self._earned += plain * tokens
        count = len(self._periods)
        if count < _STRETCH and count not in _VERDICTS:
            return
        speed = self._earned / (count * _mean(self._periods))
        if speed < self._worth * _VERDICTS.get(count, 1.0):
            self._fail()
        elif count == _STRETCH:
            self._fails, self._credit, self._lost = 0, min(self._credit + 1, _MOST_CREDIT), 0.0
            self._forget()

    def _fail(self) -> None:
        """Drafts do not pay."""
        self._forget()
        self.short_sleep = self._credit > 0
        if self.short_sleep:  # perhaps the machine was busy
            self._credit -= 1
            self.left = self._haste = _NAP
            return
        self._fails += 1
        lost = min(max(self._lost / max(self._plain, 1e-9), self._least_lost), _MOST_LOST)
        share = _LOST_SHARE if self._fails == 1 else _LEAST_LOST_SHARE
        self.sleep(round(lost / (self._share * share)))

    def _forget(self) -> None:
        self._periods, self._earned = [], 0.0


def _mean(periods: "deque[float] | list[float]") -> float:
    most = _OUTLIER * median(periods)
    return sum(min(period, most) for period in periods) / len(periods)
