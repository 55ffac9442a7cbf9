"""Chooses how many drafts each row verifies in a step, and turns drafting off while it does not pay.

Length: averages per row say how often its first draft and later ones are kept, and step times are measured by the
number of drafts. The likeliest next draft of any row is added as long as expected tokens per second rise.

On and off: these estimates miss costs outside of the step. So, for each batch size, windows of 32 steps that may draft
are compared by the wall clock with steps that do not. If a window was not faster, or no row is worth a draft, drafting
is off for 128 steps, then 256, then 512 (1,024 with more than 4 rows), or half as many if a new row comes. The first
failure after a success is an accident: off for 16 steps. The same observations give the same decisions.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

FEW_ROWS, NEW = 4, -1
ROW_MEMORY, MEMORY = 0.9, 0.95  # weights of a row's observations after its next step, and of those of all rows
FIRST_RATE, STRENGTH, ROW_STRENGTH = 0.7, 2.0, 4.0
"""The rate of kept drafts before any is seen, and the weights of it and of all rows' rate, in observations."""
REVIEW_STEPS, PROBE_STEPS = 8, 64
"""Steps between two choices of lengths, and steps after which a row without drafts gets one to be measured again."""
LEAST_GAIN, LEAST_GAIN_OF_MANY = 1.05, 1.1  # of speed; among many rows the likeliest drafts are overestimated
PLAIN_STEPS, PLAIN_AGAIN, MOST_AGAIN, MOST_WAITING = 4, 32, 256, 24
"""Steps without drafts that are timed at first, steps until they are again, and steps to wait for them."""
WINDOW, WORTH, WORTH_OF_MANY = 32, 1.0, 1.2
"""The multiple of the speed without drafts that a window must reach. Rows that draft end before the others, whose steps
then have fewer rows to share their cost."""
VERDICTS = {4: 0.6, 8: 0.75, 16: 0.9, WINDOW: 1.0}  # share of that speed after so many steps
LOOKS, PATIENCE = 3, 8  # steps in which all rows draft at first, and in which none need be worth a draft later
RETRY, MOST_RETRY, RETRY_OF_MANY, ACCIDENT, HESITATION = 128, 512, 1024, 16, 64
"""Steps off: usually, after an accident, and with fewer rows than those with which drafts do not pay."""
TIMED_EACH, TIMED, OUTLIER = 32, 8, 2.5
"""While drafting is off, one step of so many is timed; the last ones count, up to this multiple of their median."""


def rounded(number: int) -> int:
    """Round to three binary digits: numbers of rows, or of drafts, that are measured together."""
    spare = max(0, number.bit_length() - 3)
    return number >> spare << spare


class StepSeconds:
    """Seconds of steps of one batch size by their number of drafts, and of the proposer per depth. slope: share of a
    step without drafts that a draft adds beyond the measured ones."""

    def __init__(self, slope: float) -> None:
        self.level, self.slope, self.asking = 0.0, slope, 0.0
        self.seen: dict[int, int] = {}
        self._ratios = {0: 1.0}

    def of(self, drafts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds [n] of steps with these numbers of drafts [n]."""
        places, ratios = list(self._ratios), list(self._ratios.values())
        return self.level * (np.interp(drafts, places, ratios) + np.maximum(drafts - places[-1], 0.0) * self.slope)

    def learn(self, drafts: int, seconds: float) -> None:
        """Take in a step. Disturbances make steps longer, so shorter ones are the better evidence."""
        self.level = self.level or seconds / (1 + self.slope * drafts)
        place = rounded(drafts)
        expected, seen = float(self.of(np.array([place], np.float64))[0]), self.seen.get(place, 0)
        error = min(max(seconds / expected, 0.5), 2.0)
        self.seen[place] = seen + 1
        share = max(0.15, 0.6 - 0.1 * seen) * (0.4 if error > 1 and seen >= 3 else 1.0)
        if drafts and 0 < seen < 3 and error < 1:
            share = 1.0  # the value so far was an accident
        self.level *= 1.0 if drafts and seen < 3 else error**share  # the machine's speed
        if not drafts:
            return
        ratio = self._ratios[place] = max(1.0, expected / self.level * error**share)
        known = sorted(self._ratios.items())  # more drafts cost no less; of two figures the smaller is the better
        self._ratios = {each: min(value, ratio) if each < place else max(value, ratio) for each, value in known}
        self.slope = max(0.002, (self._ratios[known[-1][0]] - 1) / known[-1][0])

    def relax(self) -> None:
        """Halve what drafts are known to cost, which was long ago or the first time, and measure it again."""
        self._ratios = {place: (1 + ratio) / 2 for place, ratio in self._ratios.items()}
        self.seen, self.slope = dict.fromkeys(self.seen, 1), self.slope / 2


class Drafting:
    """Drafting with one range of batch sizes: on, or off for some steps to come."""

    def __init__(self, *, few: bool, off: int = 0) -> None:
        self.plain_due, self._waited, self._since_plain, self._again = PLAIN_STEPS, 0, 0, PLAIN_AGAIN
        self._few, self._accidents, self._fails = few, 1, 0
        self._begin()
        self.off, self.long, self._half = off, off > 0, off // 2

    def _begin(self) -> None:
        self.off, self.looks, self._patience, self._worthless = 0, LOOKS, 0, 0
        self._periods, self._earned = list[float](), 0.0

    def rests(self, *, new_row: bool) -> bool:
        """True if the coming step has no drafts, since they are off or it is to be timed."""
        if self.off:
            self.off -= 1
            if not self.off or (new_row and self.off <= self._half):
                self._begin()
        elif self._since_plain >= self._again:
            self.plain_due, self._waited, self._since_plain = PLAIN_STEPS, 0, 0
            self._again = min(2 * self._again, MOST_AGAIN)
        self._waited += 1
        return self.off > 0 or (self.plain_due > 0 and self._waited <= MOST_WAITING)

    def note(self, *, worth: bool) -> None:
        """Some row is worth a draft in the step under way, or none is."""
        self._worthless, self._patience = (0, PATIENCE) if worth else (self._worthless + 1, self._patience)
        if self._worthless > self._patience:
            self._fail()

    def learn(self, period: float, plain: float, tokens: float) -> None:
        """Take in a step that might draft: its seconds, those of one without drafts, and its tokens per row."""
        if self.off or self.looks:  # first steps of a kind take long
            return
        self._since_plain += 1
        self._periods.append(period)
        self._earned += plain * tokens
        count = len(self._periods)
        worth = VERDICTS.get(count, 0.0) * (WORTH if self._few else WORTH_OF_MANY)
        if worth and self._earned < worth * count * _mean(self._periods):
            self._fail()
        elif count == WINDOW:
            self._accidents, self._fails, self._periods, self._earned = 1, 0, [], 0.0

    def _fail(self) -> None:
        retry, self.long = min(RETRY << self._fails, MOST_RETRY) if self._few else RETRY_OF_MANY, not self._accidents
        self.off, self._fails = (retry, self._fails + 1) if self.long else (ACCIDENT, self._fails)
        self._half, self._accidents = self.off // 2, 0


class DraftLength:
    """Chooses how deep each row drafts. For each step: `passes`, then `rests` unless that is true, then `limits` and
    `learn` unless that is true."""

    def __init__(self, levels: Sequence[int], *, sleeps: bool = False) -> None:
        """levels: drafts down to each depth, rising: of chains 1, 2, 3, ..., of a tree its nodes so far; sleeps: steps
        are faster while the proposer sleeps, since it need not follow the rows."""
        self._sleeps, self._nodes = sleeps, np.array([0, *levels], np.int64)
        self._rows, self._all, self._depths = np.zeros((0, 6)), np.zeros(6), np.zeros(0, np.int64)
        """By slot, and of all rows: first drafts and kept ones, later drafts behind kept ones and kept ones, depths
        asked for and offered; by slot, chosen depths."""
        self._waiting: list[tuple[Ints, Ints, Ints, Ints]] = []
        self._given: Ints | None = None  # by slot, the depths of the step under way, if any row was asked for drafts
        self._size, self._due, self._turn, self._gained, self._fresh = 0, True, 0, 0, False
        self._seconds: dict[int, StepSeconds] = {}
        self._plain: dict[int, deque[float]] = {}  # wall-clock seconds of steps without drafts
        self._drafting: dict[int, Drafting] = {}
        self._last: tuple[float, int, bool] | None = None  # beginning, rows and rest of a step that is timed

    def add_row(self, slot: int) -> None:
        """A row has taken a slot; observations of the slot's previous row are discarded."""
        if slot >= self._depths.size:
            more = max(16, 2 * slot) - self._depths.size
            self._rows = np.concatenate((self._rows, np.zeros((more, 6))))
            self._depths = np.concatenate((self._depths, np.zeros(more, np.int64)))
        self._rows[slot], self._depths[slot], self._fresh = 0.0, NEW, True
        few = self._last is not None and self._last[1] <= FEW_ROWS
        self._last = None if few else self._last  # perhaps there was nothing to do meanwhile

    def passes(self, batch_size: int) -> bool:
        """True if the next step has no drafts and is not timed, as in most of a long time off."""
        drafting = self._drafting.get((batch_size - 1).bit_length())
        drafted = self._last is not None and not self._last[2]  # that step is still to be timed
        if drafting is None or not drafting.long or drafting.off % TIMED_EACH < 2 or self._fresh or drafted:
            return False
        drafting.off -= 1
        self._last = None
        return True

    def rests(self, batch_size: int, moment: float, *, mixed: bool = False) -> bool:
        """True if the next step has no drafts and is not learned from. moment: wall-clock seconds; mixed: some rows
        compute more than one position."""
        if self._last is not None:
            self._time(moment - self._last[0], *self._last[1:])
        drafting, seconds = self._drafting_of(batch_size), self._seconds_of(batch_size)
        off, plain_due, rests = drafting.off, drafting.plain_due, drafting.rests(new_row=self._fresh)
        if off and not drafting.off:
            seconds.relax()
            self._due = True
        elif drafting.plain_due > plain_due:
            seconds.seen[0] = 0
        self._last = None if mixed else (moment, batch_size, rests)
        self._gained, self._fresh = 0, False
        return rests

    def asleep(self, batch_size: int) -> bool:
        """True if there will be no drafts for long, so that the proposer need not follow the rows."""
        return self._sleeps and (drafting := self._drafting_of(batch_size)).long and drafting.off > 0

    def limits(self, slots: Ints, batch_size: int, most: Ints) -> Ints:
        """Drafts for each of the rows [rows] at `slots`, at most `most`. batch_size: others included."""
        drafting, few, self._given = self._drafting_of(batch_size), batch_size <= FEW_ROWS, None
        if self._seconds_of(batch_size).seen.get(0, 0) < LOOKS:  # its thread's seconds without drafts
            return np.zeros_like(most)
        other = rounded(batch_size) != self._size or bool((self._depths[slots] == NEW).any())
        if self._due or other or len(self._waiting) >= (2 if few else REVIEW_STEPS):
            self._review(slots, batch_size)
        depths = self._depths[slots]
        if drafting.looks:
            depths = np.maximum(depths, 1) if few else np.ones_like(depths)
        else:
            drafting.note(worth=bool(depths.any()))
            self._turn += 1
            if self._turn % PROBE_STEPS == 0:
                silent = np.flatnonzero(depths == 0)
                depths[silent[self._turn // PROBE_STEPS % silent.size] if silent.size else 0] += 1
        depths = np.minimum(depths, np.searchsorted(self._nodes, most, side="right") - 1)
        if depths.any():
            self._given = np.zeros_like(self._depths)
            self._given[slots] = depths
        return np.asarray(self._nodes[depths])

    def learn(
        self,
        slots: Ints,
        drafted: Ints,
        kept: Ints,
        tokens: int,
        seconds: float,
        proposing: float = 0,
        following: float = 0,
    ) -> None:
        """Learn from a step of so many tokens and seconds of its thread. slots, drafted, kept: [rows] that might draft,
        their drafts, and how deep these were kept; proposing, following: the proposer's seconds, and to follow rows."""
        if not slots.size:
            return
        given, self._given = self._given, None
        drafts, known, drafting = int(drafted.sum()), self._seconds_of(slots.size), self._drafting_of(slots.size)
        self._gained += int(kept.sum())
        if given is not None:
            asked = np.flatnonzero(given[slots])
            depths, offered = given[slots[asked]], np.searchsorted(self._nodes, drafted[asked])
            self._waiting.append((slots[asked], depths, offered, kept[asked]))
            if drafting.looks and (drafts or not self._sleeps):  # after a sleep there are none for some rows
                drafting.looks, self._due = drafting.looks - 1, True
            price = proposing / (1 + int(depths.max()))
            known.asking += (price - known.asking) * (0.2 if 0 < known.asking < price else 0.6)
        own = seconds - proposing - (following if self._sleeps and given is None else 0.0)
        if tokens - drafts == slots.size and own > 0:  # the cost of drafts cannot be told from that of prompts
            known.learn(drafts, own)

    def _review(self, slots: Ints, batch_size: int) -> None:
        """Learn from the observed steps, and choose all depths anew."""
        self._size, self._due = rounded(batch_size), False
        for known, asked, offered, kept in self._waiting:
            offered, any_offered = np.minimum(asked, offered), np.minimum(1, offered)
            reached = np.minimum(kept + 1, offered) - any_offered
            counts = np.stack((any_offered, kept > 0, reached, np.maximum(kept - 1, 0), asked, offered), axis=1)
            self._rows[known] = ROW_MEMORY * self._rows[known] + counts
            self._all = MEMORY * self._all + counts.mean(axis=0)
        self._waiting, depth = [], self._nodes.size - 1
        every, rows = self._all + STRENGTH * np.array([1.0, FIRST_RATE, 0.0, 0.0, 1.0, 1.0]), self._rows[slots]
        every[2:4] += STRENGTH * np.array([1.0, every[1] / every[0]])  # later drafts fare as first ones, if unseen
        rates = (rows[:, 1::2] + ROW_STRENGTH * every[1::2] / every[::2]) / (rows[:, ::2] + ROW_STRENGTH)
        probability, present = rates[:, :1] * rates[:, 1:2] ** np.arange(depth), rates[:, 2:]
        order = np.argsort(-probability, axis=None, kind="stable")
        gains = np.cumsum((probability * present).reshape(-1)[order])
        drafts = np.cumsum((present * np.diff(self._nodes)).reshape(-1)[order])
        costs = self._seconds_of(batch_size)
        seconds = costs.of(drafts) + costs.asking * (2 + np.maximum.accumulate(order % depth))
        speeds = (batch_size + gains) / np.maximum(seconds, 1e-12)
        best, least = int(speeds.argmax()), LEAST_GAIN if batch_size <= FEW_ROWS else LEAST_GAIN_OF_MANY
        count = best + 1 if speeds[best] * costs.level > least * batch_size else 0
        self._depths[slots] = np.bincount(order[:count] // depth, minlength=slots.size)

    def _time(self, period: float, rows: int, rested: bool) -> None:
        """Take in the wall-clock seconds of the step that has ended."""
        drafting, size = self._drafting_of(rows), rounded(rows)
        if rested:
            self._plain.setdefault(size, deque(maxlen=TIMED)).append(period)
            drafting.plain_due -= drafting.plain_due > 0
        elif self._plain:  # where rows come and go, no size lasts long enough
            nearest = min(self._plain, key=lambda other: abs(other - size))
            drafting.learn(period, _mean(self._plain[nearest]), 1 + self._gained / rows)

    def _drafting_of(self, rows: int) -> Drafting:
        size = (rows - 1).bit_length()
        if size not in self._drafting:  # drafts that do not pay with fewer rows do not with more
            off = {other: one.off for other, one in self._drafting.items() if one.off and one.long}
            steps = max((left for other, left in off.items() if other < size), default=HESITATION if off else 0)
            self._drafting[size] = Drafting(few=rows <= FEW_ROWS, off=steps)
        return self._drafting[size]

    def _seconds_of(self, rows: int) -> StepSeconds:
        size = rounded(rows)
        if size not in self._seconds:
            nearest = min(self._seconds, key=lambda other: abs(other - size), default=None)
            slope = 0.1 / size if nearest is None else self._seconds[nearest].slope * min(1.0, nearest / size)
            self._seconds[size] = StepSeconds(slope)
        return self._seconds[size]


def _mean(periods: Sequence[float]) -> float:
    most = OUTLIER * median(periods)
    return sum(min(period, most) for period in periods) / len(periods)
