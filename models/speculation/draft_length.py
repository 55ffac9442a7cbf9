"""Chooses how many drafts each row verifies in a step, and turns drafting off while it does not pay.

Length: averages per row say how often its first draft and later ones are kept, and step times are measured by the
number of drafts. The likeliest next draft of any row is added as long as expected tokens per second rise.

On and off: these estimates miss costs outside of the step. So, for each range of batch sizes, an account of seconds is
kept. A step that may draft takes its time out, and pays in the time that its tokens take without drafts. Once the
account is four steps in the red, or no row is worth a draft, drafting is off until steps without drafts have taken a
hundred times the loss since it went on, or half of that and a new row comes; twice as long if it fails again. So trials
cost 2 % of the time at most, on every machine. The same observations give the same decisions.
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
FIRST_PLAIN, HESITATION, PLAIN_STEPS = 8, 64, 4
"""Steps without drafts that are timed at first, at first where drafting is off with other batch sizes, and later."""
PLAIN_AGAIN, MOST_AGAIN = 64, 1024
"""Steps that may draft until some without drafts are timed again, at first and after many times."""
LOOKS, PATIENCE = 3, 8  # steps in which all rows draft at first, and in which none need be worth a draft later
SHARE, MOST_FAILS = 0.01, 1  # of the time that trials may cost, and how often it is halved
ALLOWED, CREDIT, LEAST_LOSS = 4.0, 8.0, 0.25
"""Steps without drafts: how far in the red an account may be, how much gain that minds, and the loss of any trial."""
STRETCH = 16
"""Steps of a rest that are timed together."""
TIMED, OUTLIER = 16, 2.5
"""The last times count, up to this multiple of their median."""


def rounded(number: int) -> int:
    """Round to three binary digits: numbers of rows, or of drafts, that are measured together."""
    spare = max(0, number.bit_length() - 3)
    return number >> spare << spare


class StepSeconds:
    """Seconds of steps of one batch size by their number of drafts, and of the proposer per depth. slope: share of a
    step without drafts that a draft adds beyond the measured ones; level: seconds of a step without drafts."""

    def __init__(self, slope: float, level: float = 0.0) -> None:
        self.level, self.slope, self.asking = level, slope, 0.0
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


class Account:
    """Drafting with one range of batch sizes: on, or off until its loss is made up for."""

    def __init__(self, *, owed: float = 0.0, plain: int = FIRST_PLAIN) -> None:
        """owed: seconds of steps without drafts until the first trial; plain: steps without drafts in front of it."""
        self._begin()
        self.off, self.owed, self._half, self._fails = owed > 0, owed, owed / 2, 0
        self.plain, self._again, self._since = plain, PLAIN_AGAIN, 0

    def _begin(self) -> None:
        self.off, self.looks, self._patience, self._worthless = False, LOOKS, 0, 0
        self._steps = deque[tuple[float, float]](maxlen=TIMED)
        self._count, self._lost, self._net = 0, 0.0, 0.0

    def wakes(self, *, new_row: bool) -> bool:
        """True if drafting is on again from the coming step on."""
        if not self.off or self.owed > (self._half if new_row else 0.0):
            return False
        self._begin()
        return True

    @property
    def rest(self) -> int:
        """Steps without drafts that are due."""
        return STRETCH if self.off else self.plain

    def note(self, *, worth: bool, plain: float) -> None:
        """Some row is worth a draft in the step under way, or none is."""
        self._worthless, self._patience = (0, PATIENCE) if worth else (self._worthless + 1, self._patience)
        if self._worthless > self._patience:
            self._fail(plain)

    def rested(self, steps: int, seconds: float) -> None:
        """Take in steps without drafts."""
        self.plain, self.owed = max(0, self.plain - steps), self.owed - seconds

    def drafted(self, seconds: float, proposing: float, plain: float, tokens: float) -> None:
        """Take in a step that might draft, where one without drafts takes `plain` seconds: its tokens per row, and the
        proposer's seconds in it, which count in full: behind every sleep it may have much to read."""
        if self.off:
            return
        own = proposing if self._fails else 0.0  # what is slow the first time alone is an accident
        self._steps.append((seconds - own, own - plain * tokens))
        self._count, self._since = self._count + 1, self._since + 1
        if self._count <= LOOKS:
            return  # first steps of a kind take long, of which there must be others to be told
        loss = self._loss(LOOKS + 1 if self._count == LOOKS + 1 else 1)
        self._net, self._lost = self._net + loss, max(self._lost + loss, -CREDIT * plain)
        if self._lost <= -CREDIT * plain:
            self._fails = 0
        if self._lost > ALLOWED * plain:
            self._fail(plain)
        elif self._since >= self._again:
            self.plain, self._since, self._again = PLAIN_STEPS, 0, min(2 * self._again, MOST_AGAIN)

    def _loss(self, last: int) -> float:
        """Seconds lost in the last steps."""
        most = OUTLIER * median(seconds for seconds, _ in self._steps)
        return sum(min(seconds, most) + more for seconds, more in list(self._steps)[-last:])

    def _fail(self, plain: float) -> None:
        lost = self._net if self._count > LOOKS else self._loss(self._count) if self._count else 0.0
        self.off, self.owed = True, max(lost, LEAST_LOSS * plain) / SHARE * 2**self._fails
        self._half, self._fails = self.owed / 2, min(self._fails + 1, MOST_FAILS)


class DraftLength:
    """Chooses how deep each row drafts. For each step: `rests`, then `limits` and `learn` unless it does."""

    def __init__(self, levels: Sequence[int], *, sleeps: bool = False) -> None:
        """levels: drafts down to each depth, rising: of chains 1, 2, 3, ..., of a tree its nodes so far; sleeps: the
        proposer must be shown a step before it can draft again."""
        self._sleeps, self._nodes = sleeps, np.array([0, *levels], np.int64)
        self._rows, self._all, self._depths = np.zeros((0, 6)), np.zeros(6), np.zeros(0, np.int64)
        """By slot, and of all rows: first drafts and kept ones, later drafts behind kept ones and kept ones, depths
        asked for and offered; by slot, chosen depths."""
        self._waiting: list[tuple[Ints, Ints, Ints, Ints]] = []
        self._given: Ints | None = None  # by slot, the depths of the step under way, if any row was asked for drafts
        self._size, self._due, self._turn, self._fresh = 0, True, 0, False
        self._seconds: dict[int, StepSeconds] = {}
        self._plain: dict[int, deque[float]] = {}  # seconds of steps without drafts
        self._accounts: dict[int, Account] = {}
        self._last: tuple[float, int, int] | None = None  # beginning, rows and rest of what is timed
        self._batch, self._drafts, self._kept, self._proposing = 0, 0, 0, 0.0  # of the step under way

    def add_row(self, slot: int) -> None:
        """A row has taken a slot; observations of the slot's previous row are discarded."""
        if slot >= self._depths.size:
            more = max(16, 2 * slot) - self._depths.size
            self._rows = np.concatenate((self._rows, np.zeros((more, 6))))
            self._depths = np.concatenate((self._depths, np.zeros(more, np.int64)))
        self._rows[slot], self._depths[slot], self._fresh = 0.0, NEW, True

    def rests(self, batch_size: int, moment: float, *, mixed: bool = False, left: int = 0) -> int:
        """Steps from the coming one on that have no drafts, if they are of the same rows; 0 if it may draft.

        Args:
            moment: seconds of the clock.
            mixed: some rows compute more than one position.
            left: steps of the last rest that did not come.
        """
        if self._last is not None:
            began, rows, rested = self._last
            self._time(moment - began, rows, rested - left, idle=self._fresh and rows <= FEW_ROWS)
        account, known = self._account(batch_size), self._seconds_of(batch_size)
        if account.wakes(new_row=self._fresh):
            known.relax()
            self._due = True
        steps = min(account.rest, 1) if mixed else account.rest
        self._last = None if mixed else (moment, batch_size, steps)
        self._batch, self._drafts, self._kept, self._proposing, self._fresh = batch_size, 0, 0, 0.0, False
        return steps

    def limits(self, slots: Ints, batch_size: int, most: Ints) -> Ints:
        """Drafts for each of the rows [rows] at `slots`, at most `most`. batch_size: others included."""
        account, few, self._given = self._account(batch_size), batch_size <= FEW_ROWS, None
        other = rounded(batch_size) != self._size or bool((self._depths[slots] == NEW).any())
        if self._due or other or len(self._waiting) >= (2 if few else REVIEW_STEPS):
            self._review(slots, batch_size)
        depths = self._depths[slots]
        if account.looks:
            depths = np.maximum(depths, 1) if few else np.ones_like(depths)
        else:
            account.note(worth=bool(depths.any()), plain=self._plain_of(batch_size))
            self._turn += 1
            if self._turn % PROBE_STEPS == 0:
                silent = np.flatnonzero(depths == 0)
                depths[silent[self._turn // PROBE_STEPS % silent.size] if silent.size else 0] += 1
        depths = np.minimum(depths, np.searchsorted(self._nodes, most, side="right") - 1)
        if depths.any():
            self._given = np.zeros_like(self._depths)
            self._given[slots] = depths
        return np.asarray(self._nodes[depths])

    def learn(self, slots: Ints, drafted: Ints, kept: Ints, proposing: float = 0.0) -> None:
        """Learn from the step under way. slots, drafted, kept: [rows] that might draft, their drafts, and how deep
        these were kept; proposing: the proposer's seconds."""
        given, self._given = self._given, None
        self._drafts, self._kept, self._proposing = int(drafted.sum()), int(kept.sum()), proposing
        if given is None:
            return
        asked, account = np.flatnonzero(given[slots]), self._account(self._batch)
        depths, offered = given[slots[asked]], np.searchsorted(self._nodes, drafted[asked])
        self._waiting.append((slots[asked], depths, offered, kept[asked]))
        if account.looks and (self._drafts or not self._sleeps):  # after a sleep there are none for some rows
            account.looks, self._due = account.looks - 1, True
        known, price = self._seconds_of(self._batch), proposing / (1 + int(depths.max()))
        known.asking += (price - known.asking) * (0.2 if 0 < known.asking < price else 0.6)

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

    def _time(self, seconds: float, rows: int, rested: int, *, idle: bool) -> None:
        """Take in what has ended: so many steps of a rest, or 0 and a step that might draft. idle: perhaps there was
        nothing to do at its end, so that its seconds say nothing."""
        account, known = self._account(rows), self._seconds_of(rows)
        if rested > 0 and idle:
            account.rested(0, rested * self._plain_of(rows))
        elif rested > 0:
            self._plain.setdefault(rounded(rows), deque(maxlen=TIMED)).append(seconds / rested)
            known.learn(0, seconds / rested)
            account.rested(rested, seconds)
        elif not idle:
            if self._drafts and seconds > self._proposing:
                known.learn(self._drafts, seconds - self._proposing)
            account.drafted(seconds, self._proposing, self._plain_of(rows), 1 + self._kept / rows)

    def _plain_of(self, rows: int) -> float:
        """Seconds of a step without drafts; where rows come and go, of the nearest batch size that was seen."""
        size = rounded(rows)
        periods = self._plain[min(self._plain, key=lambda other: abs(other - size))] if self._plain else ()
        most = OUTLIER * median(periods) if periods else 0.0
        return sum(min(period, most) for period in periods) / max(1, len(periods))

    def _account(self, rows: int) -> Account:
        size = (rows - 1).bit_length()
        if size not in self._accounts:  # drafts that do not pay with fewer rows do not with more
            owed = {other: one.owed for other, one in self._accounts.items() if one.off}
            self._accounts[size] = Account(
                owed=max((seconds for other, seconds in owed.items() if other < size), default=0.0),
                plain=HESITATION if owed else FIRST_PLAIN,
            )
        return self._accounts[size]

    def _seconds_of(self, rows: int) -> StepSeconds:
        size = rounded(rows)
        if size not in self._seconds:
            nearest = min(self._seconds, key=lambda other: abs(other - size), default=None)
            near = None if nearest is None else self._seconds[nearest]
            slope = 0.1 / size if nearest is None or near is None else near.slope * min(1.0, nearest / size)
            self._seconds[size] = StepSeconds(slope, 0.0 if near is None else near.level)
        return self._seconds[size]
