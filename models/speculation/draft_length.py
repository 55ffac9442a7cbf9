"""Chooses the number of drafts per row and step that pays for itself.

A step with drafts takes longer than one without, and gives one more token per kept draft. Both are measured while the
engine runs: `acceptance_rates` has the probability that a row keeps its first, second, third draft, `cost_curve` the
time of steps. The most probable next draft of any row is added as long as expected tokens per second rise; they may
never rise, not even with the first one.

A row without drafts would never be measured again, and a number of drafts that once took long never be tried again.
Therefore a small share of the time goes to probes, whose cost is estimated beforehand and saved up first. `stretches`
decides if there is drafting at all, by comparing measured speeds.

Nothing here reads a clock or draws at random: the same observations give the same lengths.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from troupellm.models.speculation.acceptance_rates import AcceptanceRates, Floats, Ints
from troupellm.models.speculation.cost_curve import ProposalCosts, StepCosts, rounded
from troupellm.models.speculation.on_off import OnOffController
from troupellm.models.speculation.wall_time import WallTimeOverhead

_REVIEW_STEPS: Final = 8
"""Steps with drafts between two reviews of all depths; a review costs more than a step's bookkeeping."""
_FIRST_REVIEWS: Final = 6
"""Number of first reviews that come after every step: as long as nothing is known, a guess applies to all rows."""
_COSTLY_REVIEWS: Final = 10
_MOSTLY: Final = 0.6
_FIRST_DEPTH: Final = 4
_LEARNING_REVIEWS: Final = 3
"""Number of first reviews in which all rows draft: one rejected draft is too little evidence to give up."""
_SMALL_BATCH: Final = 4
"""With at most this many rows their first steps are reviewed soon: a bad guess affects the whole step."""
_YOUNG_STEPS: Final = 2
_SETTLED: Final = 4.0
"""Observations of a row after which it no longer counts as new."""
_LEAST_GAIN, _LEAST_GAIN_OF_MANY = 1.05, 1.1
"""Least gain in tokens per second over a step without drafts: drafts also cost time outside of the step. Among many
rows the likeliest drafts are chosen, whose estimates are biased upward by luck, so they must gain more."""
_PROBE_SHARE: Final = 0.008
"""Share of the time for probes."""
_MOST_SAVED: Final = 1.0
"""Steps without drafts whose time can be saved up for probes."""
_BOOKKEEPING: Final = 2e-4
"""Seconds of a probe's bookkeeping: where steps are as short as that, probes are rare."""
_ALMOST: Final = 0.9
_PLAIN_WANTED, _PLAIN_AGAIN = 3, 2
_STALE_STEPS: Final = 192
"""After this many steps with drafts, the time of one without is measured again."""
_LOOKS: Final = 3
"""Steps in which all rows draft, at first and after a long sleep."""


class _Step(NamedTuple):
    """The drafts and kept drafts of a step in which rows were asked for drafts."""

    asked: Ints
    """Slots."""
    depths: Ints
    slots: Ints
    """Slots of all rows that `drafted` and `accepted` describe, those of `asked` among them."""
    drafted: Ints
    accepted: Ints


class _New(NamedTuple):
    """Defaults for a row without observations."""

    depth: int
    present: float
    """Probability that it has a draft at all."""


class DraftLength:
    """Chooses how deep each row drafts. Calls come from the worker's thread: `limits`, then `learn`, once per step."""

    def __init__(self, levels: Sequence[int], *, adaptive: bool = True, sleeps: bool = False) -> None:
        """
        Args:
            levels: drafts down to each depth, rising: of chains 1, 2, 3, ..., of a tree its nodes so far.
            adaptive: off always gives each row its maximum.
            sleeps: the proposer can sleep. A step is faster while it sleeps, since it need not follow the rows.
        """
        self._adaptive = adaptive
        self._nodes = np.array([0, *levels], np.int64)
        self._rates = AcceptanceRates(len(levels))
        self._costs, self._asking = StepCosts(), ProposalCosts()
        self._depths = np.zeros(0, np.int64)
        """By slot, the depth decided for it."""
        self._new: _New | None = _New(max(1, (len(levels) + 1) // 2), 1.0)
        """As of the last review; computed when it is first needed."""
        self._learning = True
        self._waiting: list[_Step] = []
        self._given: tuple[Ints, Ints] | None = None
        """Slots and depths of the step under way, if any row was asked for drafts."""
        self._size = 0
        """Rounded number of rows of the step that the last review was for."""
        self._reviews, self._due = 0, False
        self._probing = False
        self._asked = False
        """True after the first drafts: the first time takes longest, and is no measurement."""
        self._saved = 0.0
        """Seconds saved up for probes."""
        self._price = 0.0
        self._turn = 0
        self._since_plain = 0
        self._plain_due = 0
        """Number of coming steps without drafts, for comparison."""
        self._looks = _LOOKS
        """Number of coming steps in which all rows draft, for measurement."""
        self._sleeps = sleeps
        self._on_off = OnOffController()
        self._worth = True
        """At the last review some row was worth a draft."""
        self._tried: set[int] = set()
        """Rounded numbers of rows that were measured again after their first steps."""
        self._walls: dict[int, WallTimeOverhead] = {}
        """By rounded number of rows."""
        self._last: tuple[int, bool] | None = None
        """Of the last step, if it had no prompts: rounded number of rows, and True if it had drafts."""
        self._ended = 0.0

    def add_row(self, slot: int) -> None:
        """A row has taken a slot; observations of the slot's previous row are discarded."""
        self._rates.forget(slot)
        if slot >= self._depths.size:
            grown = np.zeros(max(16, 2 * slot), np.int64)
            grown[: self._depths.size] = self._depths
            self._depths = grown
        self._depths[slot] = self._of_new().depth
        self._on_off.add_row()

    def rests(self, batch_size: int, moment: float, *, mixed: bool = False) -> bool:
        """True if the next step has no drafts and is not learned from: `limits` and `learn` are not called for it.

        Args:
            moment: wall-clock seconds.
            mixed: some rows compute more than one position.
        """
        if not self._adaptive:
            return False
        rests = self._on_off.rests(batch_size, moment, mixed=mixed)
        if rests:
            self._last = None
        elif self._on_off.woke:
            self._wake(rounded(batch_size))
        return rests

    def passes(self, batch_size: int) -> bool:
        """True if the next step is inside a long sleep and is not measured: then `rests` is not called for it,
        either."""
        if not self._adaptive or not self._on_off.passes(batch_size):
            return False
        self._last = None
        return True

    def asleep(self, batch_size: int) -> bool:
        """True if there will be no drafts for long, so that the proposer need not follow the rows."""
        return self._sleeps and self._on_off.asleep(batch_size)

    def limits(self, slots: Ints, batch_size: int, most: Ints) -> Ints:
        """Drafts for each of the rows [rows].

        Args:
            slots: [rows] that may draft.
            batch_size: rows of the step, others included.
            most: [rows] that each may have.
        """
        if not self._adaptive:
            return most
        size = rounded(batch_size)
        if self._due or size != self._size or (self._waiting and len(self._waiting) >= self._patience(slots)):
            self._review(slots, batch_size)
        depths = self._depths[slots]
        if self._since_plain > _STALE_STEPS:
            self._since_plain, self._plain_due = 0, _PLAIN_WANTED
        if self._costs.of(size).plain_seen < _PLAIN_WANTED or self._plain_due:
            self._plain_due = max(0, self._plain_due - 1)
            depths = np.zeros_like(depths)  # this step measures the time without drafts
        else:
            worth = self._worth if self._looks else bool(depths.any())
            self._on_off.drafts(batch_size, worth=worth, tried=not self._looks)
            if worth and self._saved > self._price:
                depths = self._probed(depths)
        if not depths.any():
            self._given = None
            return depths
        depths = np.minimum(depths, np.searchsorted(self._nodes, most, side="right") - 1)
        chosen: Ints = self._nodes[depths]
        self._given = (slots, depths) if chosen.any() else None
        return chosen

    def learn(
        self,
        slots: Ints,
        drafted: Ints,
        accepted: Ints,
        tokens: int,
        seconds: float,
        proposing: float = 0.0,
        *,
        following: float = 0.0,
        moment: float | None = None,
    ) -> None:
        """Learn from a step.

        Args:
            slots, drafted, accepted: [rows] of all that might have drafted, with how many drafts, and how deep they
                were kept.
            tokens: positions that the step computed, of all rows.
            seconds: time of the whole step.
            proposing: the proposer's part of it.
            following: the proposer's time for following the rows, which a sleep would save.
            moment: wall-clock seconds at its end.
        """
        if not self._adaptive:
            return
        given, self._given = self._given, None
        rows, size = slots.size, rounded(slots.size)
        drafts = 0
        if given is not None:
            drafts = int(drafted.sum())
            if self._looks and (drafts or not self._sleeps):  # a proposer that was asleep has no drafts for some rows
                self._looks, self._due = self._looks - 1, True
            self._on_off.gained(int(accepted.sum()))
            if self._asked:
                self._asking.learn(given[0].size, int(given[1].max()), proposing)
            self._asked = True
            self._waiting.append(_Step(*given, slots, drafted, accepted))
        elif self._sleeps:
            seconds -= following
        self._saved = min(self._saved + _PROBE_SHARE * seconds, _MOST_SAVED * seconds)
        # In a step with prompts the cost of drafts cannot be separated from theirs.
        last, self._last = self._last, None
        if not rows or tokens - drafts != rows:
            return
        self._since_plain = self._since_plain + 1 if drafts else 0
        self._costs.of(rows).learn(drafts, seconds - proposing)
        self._last = size, drafts > 0
        if moment is None:
            return
        # A step without drafts behind one with drafts may have waited for the results of the drafts.
        if last in ((size, False), (size, drafts > 0)):
            period = moment - self._ended - (following if self._sleeps and not drafts else 0.0)
            self._wall(size).learn(period, seconds, drafts=drafts > 0)
        self._ended = moment

    def _wall(self, size: int) -> WallTimeOverhead:
        return self._walls.setdefault(size, WallTimeOverhead())

    def _wake(self, size: int) -> None:
        """After a long sleep: try again if drafts pay by now."""
        self._wall(size).relax()
        if size not in self._tried:  # first steps of a kind take long
            self._tried.add(size)
            self._costs.of(size).relax()
        self._looks, self._due, self._plain_due = _LOOKS, True, _PLAIN_AGAIN

    def _patience(self, slots: Ints) -> int:
        """Number of steps with drafts until the next review."""
        if self._probing or self._reviews < _FIRST_REVIEWS:
            return 1
        young = slots.size <= _SMALL_BATCH and bool((self._rates.seen(slots) < _SETTLED).any())
        return _YOUNG_STEPS if young else _REVIEW_STEPS

    def _review(self, slots: Ints, batch_size: int) -> None:
        """Learn from the observed steps, and decide all depths anew."""
        self._size, self._probing, self._due = rounded(batch_size), False, False
        if self._waiting:
            seen, self._waiting = [self._outcome(step) for step in self._waiting], []
            known, asked, offered, kept = (np.concatenate(each) for each in zip(*seen, strict=True))
            self._rates.learn(known, asked, offered, kept, len(seen))
            self._reviews += 1
        rates, present = self._rates.of(slots)
        probability: Floats = np.cumprod(rates, axis=1, dtype=np.float64)
        paying = self._paying(probability, np.minimum.accumulate(present, axis=1), batch_size)
        self._depths[slots] = np.bincount(paying // probability.shape[1], minlength=slots.size)
        self._worth = paying.size > 0
        learning = self._reviews <= _LEARNING_REVIEWS and slots.size <= _SMALL_BATCH
        if slots.size <= _SMALL_BATCH and self._reviews <= _COSTLY_REVIEWS:
            # First steps of a kind take long: drafts that are mostly kept are tried until their cost is known.
            kept = (probability >= _MOSTLY).sum(axis=1)
            self._depths[slots] = np.maximum(self._depths[slots], np.minimum(kept, _FIRST_DEPTH))
        if learning or self._looks:  # one bad guess says little, and costs a few steps at most
            self._depths[slots] = np.maximum(self._depths[slots], 1)
        self._new = None
        self._learning = learning

    def _of_new(self) -> "_New":
        """The defaults of a new row, from the rates of all rows so far."""
        if self._new is None:
            rates, present = self._rates.of_new()
            alone: Floats = np.cumprod(rates, dtype=np.float64)[None]
            deep = self._paying(alone, np.minimum.accumulate(present)[None], self._size).size
            self._new = _New(max(deep, 1) if self._learning else deep, float(present[0]))
        return self._new

    def _outcome(self, step: _Step) -> tuple[Ints, Ints, Ints, Ints]:
        """Of the rows that were asked for drafts: slots, depths asked for, depths with a draft, depths kept."""
        place = {slot: number for number, slot in enumerate(step.slots.tolist())}
        asked = np.flatnonzero(step.depths > 0)
        places = np.array([place[slot] for slot in step.asked[asked].tolist()], np.int64)
        offered = np.searchsorted(self._nodes, step.drafted[places], side="left")
        return step.slots[places], step.depths[asked], offered, step.accepted[places]

    def _paying(self, probability: Floats, present: Floats, batch_size: int) -> Ints:
        """Drafts that pay, the most probable first: as places in the flat tables.

        Args:
            probability: [rows, depths] that a draft is kept; falls with the depth.
            present: [rows, depths] that the proposer has one.
        """
        order = np.argsort(-probability, axis=None, kind="stable")
        gains = probability.reshape(-1)[order]
        drafts = np.cumsum((present * np.diff(self._nodes)).reshape(-1)[order])
        depths = np.maximum.accumulate(order % probability.shape[1]) + 1
        curve = self._costs.of(batch_size)
        seconds = curve.seconds(drafts) + self._asking.seconds(probability.shape[0], depths)
        seconds *= self._wall(rounded(batch_size)).factor
        rates = (batch_size + np.cumsum(gains)) / np.maximum(seconds, 1e-12)
        rates[drafts > curve.reach] = 0.0
        best = int(rates.argmax())
        least = _LEAST_GAIN if batch_size <= _SMALL_BATCH else _LEAST_GAIN_OF_MANY
        pays = rates[best] > least * batch_size / max(curve.level, 1e-12)
        chosen: Ints = order[: best + 1 if pays else 0]
        return chosen

    def _probed(self, depths: Ints) -> Ints:
        """Sometimes other depths for this step, if their possible cost has been saved up."""
        curve = self._costs.of(self._size)
        silent = np.flatnonzero(depths == 0)
        self._turn += 1
        if silent.size:
            # One of those without drafts gets one, each in its turn.
            probed = depths.copy()
            probed[silent[self._turn % silent.size]] = 1
            price = (curve.expected(float(self._nodes[1])) - curve.level) * self._of_new().present
            price += float(self._asking.seconds(1, np.ones(1, np.int64))[0])
            price += (self._wall(self._size).factor - 1) * curve.level
            # One high measurement may have been an accident: the price stays within what can be saved up.
            self._price = min(price + _BOOKKEEPING, _ALMOST * _MOST_SAVED * curve.level)
        else:
            probed = np.minimum(depths + 1, self._nodes.size - 1)
            if (probed == depths).all():  # there is nothing beyond
                self._price = _ALMOST * curve.level
                return depths
            before, after = (curve.expected(float(self._nodes[each].sum())) for each in (depths, probed))
            self._price = min(max(0.0, after - before) + _BOOKKEEPING, _ALMOST * _MOST_SAVED * curve.level)
        if self._saved < self._price:
            return depths
        self._saved -= self._price
        self._probing = True
        return probed
