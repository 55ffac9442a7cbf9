"""Step times as a function of the number of drafts, measured while the engine runs."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_KNOTS: Final[tuple[int, ...]] = (
    *range(17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 2048,
)  # fmt: skip
"""Numbers of drafts that are measured; others count for the nearest."""
_FIRST_SLOPE: Final = 0.1
"""Initial cost of a draft, as a share of a step without drafts, divided by the rows."""
_FIRST_REACH: Final = 4.0
_LEAST_SLOPE: Final = 0.002
_OUTLIER: Final = 2.0
"""Bounds on a single measurement, relative to the expected time."""
_SLOW: Final = 1.25
"""A single step that took this many times the expected time is ignored."""
_TRUST_IN_SLOW: Final = 0.4
"""Weight of a step that took longer than expected, relative to one that took less."""
_ASKING_ITSELF: Final = 0.3
"""Fixed share of a proposer's time, independent of the depth, as long as only one depth is known."""
_SURE: Final = 3
"""Observations after which a knot's ratio shows the machine's current speed."""
_SLOWEST: Final = 0.15
"""Share of the error that is corrected at an observation, after the first few."""


class CostCurve:
    """Seconds of steps with the same number of rows, by their number of drafts.

    Kept as seconds without drafts (`level`) times a ratio per number of drafts. The level follows the machine's speed,
    with any number of drafts in the observed steps; the ratios stay.
    """

    def __init__(self, rows: int, seconds_per_draft: float | None = None) -> None:
        """
        Args:
            rows: of the steps.
            seconds_per_draft: the value of steps with other numbers of rows, if it is known.
        """
        self._rows = rows
        self._per_draft = seconds_per_draft
        self.level = 0.0
        self.slope = _FIRST_SLOPE / rows
        """Share of the level that a draft adds, on average over the known points."""
        self._was_slow = False
        self._measured: dict[int, _Ratio] = {}
        """Measured ratios, by knot."""
        self._places, self._ratios = [0.0], [1.0]
        """The known points, rising in both."""

    @property
    def plain_seen(self) -> int:
        """Observed steps without drafts."""
        return self._measured[0].seen if 0 in self._measured else 0

    @property
    def reach(self) -> float:
        """The number of drafts up to which the costs count as known."""
        return max(_FIRST_REACH, self._rows / 4, 2 * self._places[-1])

    def seconds(self, drafts: Floats) -> Floats:
        """Times [n] of steps with these numbers of drafts [n]: measured, interpolated, or extrapolated by the slope."""
        beyond = np.maximum(drafts - self._places[-1], 0.0)
        found: Floats = self.level * (np.interp(drafts, self._places, self._ratios) + beyond * self.slope)
        return found

    def expected(self, drafts: float) -> float:
        """As `seconds`, for one number of drafts."""
        places, ratios = self._places, self._ratios
        if drafts >= places[-1]:
            return self.level * (ratios[-1] + (drafts - places[-1]) * self.slope)
        above = bisect_right(places, drafts)
        part = (drafts - places[above - 1]) / (places[above] - places[above - 1])
        return self.level * (ratios[above - 1] + part * (ratios[above] - ratios[above - 1]))

    def learn(self, drafts: int, seconds: float) -> None:
        """Take in the time of a step."""
        if not self.level:
            self.level = seconds / (1 + self.slope * drafts)
            if self._per_draft is not None:
                self.slope = self._per_draft / self.level
        expected = self.expected(drafts)
        error = min(max(seconds / expected, 1 / _OUTLIER), _OUTLIER)
        knot = _nearest_knot(drafts)
        known = self._measured.get(knot)
        if known is None:
            known = self._measured[knot] = _Ratio()
        elif error > _SLOW and not self._was_slow:
            self._was_slow = True  # perhaps it is over
            return
        self._was_slow = error > _SLOW
        # Disturbances make steps longer, so shorter steps are better evidence.
        trust = 1.0 if error < 1 or known.seen < _SURE else _TRUST_IN_SLOW
        if error < 1 and 0 < known.seen < _SURE and drafts:
            trust = 1 / _share(known.seen)  # the value so far was an accident
        if not drafts:
            self.level *= error ** (trust * _share(known.seen))
        else:
            if known.seen >= _SURE:
                self.level *= error ** (trust * _SLOWEST)
            # The base is the current value, which between two knots is no measurement of this one.
            known.value = max(1.0, expected / self.level * error ** (trust * _share(known.seen)))
        known.seen += 1
        self._know(knot)

    def relax(self) -> None:
        """Halve the known cost of drafts, and give new measurements more weight."""
        for knot, known in self._measured.items():
            if knot:
                known.value, known.seen = 1 + (known.value - 1) / 2, min(known.seen, 1)
        self._know(max(self._measured, default=0))

    def _know(self, latest: int) -> None:
        """More drafts cost no less; of two figures the smaller is the better."""
        for knot, known in self._measured.items():
            if knot < latest:
                known.value = min(known.value, self._measured[latest].value)
        self._places, self._ratios = [0.0], [1.0]
        for knot in sorted(self._measured.keys() - {0}):
            value = self._measured[knot].value
            if self._measured[knot].seen < _SURE and self._places[-1]:
                # Seen once or twice, perhaps at a bad moment: no more than in proportion to fewer drafts.
                value = min(value, 1 + (self._ratios[-1] - 1) * knot / self._places[-1])
            self._places.append(float(knot))
            self._ratios.append(max(value, self._ratios[-1]))
        if len(self._places) == 1:
            return
        self.slope = max(_LEAST_SLOPE, (self._ratios[-1] - 1) / self._places[-1])


@dataclass(slots=True)
class _Ratio:
    value: float = 1.0
    seen: int = 0


def _share(seen: int) -> float:
    """Share of an error that is corrected after this many observations."""
    return max(_SLOWEST, 0.6 - 0.1 * seen)


def _nearest_knot(drafts: int) -> int:
    above = bisect_left(_KNOTS, drafts)
    if above == len(_KNOTS):
        return _KNOTS[-1]
    return min(_KNOTS[max(0, above - 1)], _KNOTS[above], key=lambda knot: abs(knot - drafts))


class StepCosts:
    """A curve for each number of rows; a new one begins as the nearest does."""

    def __init__(self) -> None:
        self._curves: dict[int, CostCurve] = {}

    def of(self, rows: int) -> CostCurve:
        size = rounded(rows)
        curve = self._curves.get(size)
        if curve is None:
            nearest = min(self._curves, key=lambda other: abs(other - size), default=None)
            # A draft costs the same seconds, about: to a step of more rows it adds a smaller share.
            other = None if nearest is None else self._curves[nearest]
            curve = CostCurve(size, other.slope * other.level if other and other.level else None)
            self._curves[size] = curve
        return curve


class ProposalCosts:
    """Seconds that the proposer takes, by rows and by the greatest depth that was asked for."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        self._seen: dict[tuple[int, int], int] = {}

    def learn(self, rows: int, depth: int, seconds: float) -> None:
        known = self._seconds.setdefault(rounded(rows), {})
        before, seen = known.get(depth), self._seen.get((rounded(rows), depth), 0)
        self._seen[rounded(rows), depth] = seen + 1
        if before is None:
            known[depth] = seconds
        elif seen < _SURE:
            known[depth] = min(before, seconds)
        else:
            share = _share(0) if seconds < before else _SLOWEST
            known[depth] = before + share * (min(seconds, _OUTLIER * before) - before)

    def seconds(self, rows: int, depths: NDArray[np.int64]) -> Floats:
        """[n] for depths [n]. Beyond what is known in proportion, below it a little more than that."""
        size = rounded(rows)
        nearest = min(self._seconds, key=lambda other: abs(other - size), default=None)
        if nearest is None:
            return np.zeros(depths.size)
        known = self._seconds[nearest]
        places, values = sorted(known), list[float]()
        for place in places:
            value = known[place]
            if values and self._seen[nearest, place] < _SURE:
                value = min(value, values[-1] * place / places[len(values) - 1])
            values.append(value)
        found: Floats = np.interp(depths, places, values)
        found *= np.maximum(depths / places[-1], 1.0) * max(1.0, size / nearest)
        found *= _ASKING_ITSELF + (1 - _ASKING_ITSELF) * np.minimum(depths / places[0], 1.0)
        return found


def rounded(rows: int) -> int:
    """Round to three binary digits: numbers of rows that share a curve."""
    spare = max(0, rows.bit_length() - 3)
    return rows >> spare << spare
