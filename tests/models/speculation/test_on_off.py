"""Drafts in a crowd whose rows come and go, on a simulated machine: never much slower than without, even if the
estimates miss a cost."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from troupellm.models.speculation.draft_length import DraftLength
from troupellm.tests.support.speculation.counted_rests import CountedRests

MOST = 4


@dataclass(frozen=True)
class Machine:
    """The costs of a step, as parts of one without drafts."""

    draft: float = 0.05
    """A draft, of a step of up to eight rows; of more it is a smaller part."""
    deciding: float = 0.1
    """The cost of each proposer that is awake."""
    verifying: float = 0.3
    """Any drafts at all."""
    following: float = 0.0
    """The cost of following the rows, unless asleep."""
    noise: float = 0.0
    first: float = 0.0
    """In the first steps with drafts."""


class Crowd:
    """Rows that write 64 to 128 tokens each, one behind the other, drafting or not. A prompt takes a step longer."""

    def __init__(self, machine: Machine, keep: float, rows: int, *, speculates: bool = True) -> None:
        self._machine, self._keep, self._rows = machine, keep, rows
        self._source = random.Random(5)
        self._length = DraftLength(range(1, MOST + 1), sleeps=machine.following > 0) if speculates else None
        self._counted = None if self._length is None else CountedRests(self._length)
        self._wall = self._spent = 0.0
        """By the disturbed clock, and without what disturbs it."""
        self._able = [False] * rows
        self._warm = 4
        self.drafting_steps = 0

    def round(self, answers: int = 6) -> float:
        """Tokens per second; answers: of each row."""
        begin, total = self._spent, answers * self._rows
        left = [0] * self._rows
        todo = [64 + 7 * number % 16 * 4 for number in range(total)]
        tokens = sum(todo)
        while todo or any(left):
            new = [row for row in range(self._rows) if not left[row]][: len(todo)]
            for row in new:
                left[row] = todo.pop()
            self._step([row for row in range(self._rows) if left[row]], new, left)
        return tokens / (self._spent - begin)

    def _step(self, rows: list[int], new: list[int], left: list[int]) -> None:
        machine, length, size = self._machine, self._length, len(rows)
        took, drafts = 0.6 + 0.4 * size / self._rows + 0.5 * len(new), 0
        kept = np.zeros(size, np.int64)
        slots, drafted = np.array(rows), np.zeros(size, np.int64)
        rests = True
        if self._counted is not None and length is not None:
            for row in new:
                self._counted.add_row(row)
            rests = self._counted.rests(size, self._wall, mixed=bool(new))
            for row in rows:
                self._able[row] = not rests and (row in new or self._able[row])
            if not rests:
                most = np.array([0 if row in new else min(MOST, left[row] - 1) for row in rows])
                asked = np.flatnonzero(most > 0)
                if asked.size:
                    drafted[asked] = length.limits(slots[asked], size, most[asked])
                drafted *= np.array([self._able[row] or not machine.following for row in rows])
                for place, limit in enumerate(drafted.tolist()):
                    while kept[place] < limit and self._source.random() < self._keep:
                        kept[place] += 1
                drafts = int(drafted.sum())
                took += machine.draft * drafts * min(1.0, 8 / self._rows) + machine.verifying * (drafts > 0)
                took += machine.following + machine.deciding
                if drafts and self._warm:
                    self._warm, took = self._warm - 1, took + machine.first
                for row in rows:
                    self._able[row] = True
        self._spent += took
        self._wall += took * (1 + machine.noise * self._source.random() ** 4)
        if length is not None and not rests:
            self.drafting_steps += drafts > 0
            length.learn(slots, drafted, kept)
        for place, row in enumerate(rows):
            left[row] = max(0, left[row] - 1 - int(kept[place]))


DEAR = {
    "marginal": (Machine(), 0.35),
    "deciding": (Machine(deciding=0.5, verifying=0.8), 0.6),
    "dear": (Machine(draft=0.12, verifying=1.0, first=3.0), 0.8),
    "following": (Machine(draft=0.12, following=0.25, first=3.0), 0.7),
    "noisy": (Machine(draft=0.12, noise=3.0), 0.5),
}


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("kind", list(DEAR))
def test_a_crowd_for_which_drafts_do_not_pay_is_hardly_slower_than_without(kind: str, rows: int) -> None:
    machine, keep = DEAR[kind]
    ours, theirs = Crowd(machine, keep, rows), Crowd(machine, keep, rows, speculates=False)
    ratios = [ours.round() / theirs.round() for _ in range(4)]
    assert ratios[0] > 0.93, "when nothing is known"
    assert min(ratios[1:]) > 0.975


@pytest.mark.parametrize("following", [0.0, 0.15])
def test_a_crowd_for_which_drafts_pay_has_them(following: float) -> None:
    machine = Machine(draft=0.01, verifying=0.1, following=following, noise=1.0, first=3.0)
    ours, theirs = Crowd(machine, 0.8, 8), Crowd(machine, 0.8, 8, speculates=False)
    ratios = [ours.round() / theirs.round() for _ in range(3)]
    assert min(ratios[1:]) > 1.5


def test_one_sequence_keeps_what_drafts_bring_on_a_machine_that_is_disturbed() -> None:
    machine = Machine(draft=0.06, noise=4.0, first=5.0)
    ours, theirs = Crowd(machine, 0.9, 1), Crowd(machine, 0.9, 1, speculates=False)
    ratios = [ours.round(20) / theirs.round(20) for _ in range(3)]
    assert min(ratios[1:]) > 1.7


def test_what_did_not_pay_is_found_to_pay_when_it_does() -> None:
    crowd = Crowd(Machine(draft=0.12), 0.1, 8)
    for _ in range(3):
        crowd.round()
    before = crowd.drafting_steps
    crowd._keep, crowd._machine = 0.95, Machine(draft=0.02)
    for _ in range(4):
        crowd.round()
    assert crowd.drafting_steps - before > 100


@pytest.mark.parametrize("sizes", [(20, 32), (32, 20)])
@pytest.mark.parametrize(("speed", "pays"), [(0.97, False), (0.8, False), (1.4, True)])
def test_each_step_is_compared_with_those_of_as_many_rows(sizes: tuple[int, int], speed: float, pays: bool) -> None:
    length, moment, drafting = DraftLength([1]), 0.0, 0
    counted = CountedRests(length)
    for slot in range(32):
        counted.add_row(slot)
    for step in range(800):
        rows = sizes[step % 2]
        slots, took = np.arange(rows), rows / 20
        if not counted.rests(rows, moment):
            drafted = length.limits(slots, rows, np.ones(rows, np.int64))
            kept = drafted * (slots % 4 != 0)
            length.learn(slots, drafted, kept)
            if drafted.any():
                drafting += 1
                took *= (1 + kept.mean()) / speed
        moment += took
    assert drafting > 400 if pays else 3 <= drafting < 200


class Alone:
    """One row that never ends, on a machine whose steps with drafts take `cost` times as long."""

    def __init__(self, cost: float, kept: float) -> None:
        length, source, slots = DraftLength([1]), random.Random(4), np.arange(1)
        counted, self.seconds, self.tokens = CountedRests(length), 0.0, 0
        counted.add_row(0)
        for _ in range(round(1800 + 120 * cost)):
            self.tokens += 1
            if counted.rests(1, self.seconds):
                self.seconds += 1.0
                continue
            drafted = length.limits(slots, 1, np.ones(1, np.int64))
            keeps = drafted * (source.random() < kept)
            self.tokens += int(keeps.sum())
            self.seconds += cost if drafted.any() else 1.0
            length.learn(slots, drafted, keeps)


@pytest.mark.parametrize("cost", [1.05, 1.5, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_trials_cost_two_percent_at_most_on_every_machine(cost: float, kept: float) -> None:
    alone = Alone(cost, kept)
    assert alone.tokens / alone.seconds > 0.98
    if 1 + kept > 1.2 * cost:
        assert alone.tokens / alone.seconds > 0.95 * (1 + kept) / cost


def test_a_rest_that_is_cut_short_counts_as_long_as_it_was() -> None:
    whole, cut = DraftLength([1]), DraftLength([1])
    steps = []
    for length, pieces in ((whole, 1), (cut, 4)):
        length.add_row(0)
        moment, number, left = 0.0, 0, 0
        while planned := length.rests(1, moment, left=left):
            took = -(-planned // pieces)
            left, number, moment = planned - took, number + took, moment + took
        steps.append(number)
    assert steps[0] == steps[1] == 8


def test_a_sleep_ends_among_short_answers_too() -> None:
    """Each new row may have been waited for, so that the time until it says nothing; the steps before it count."""
    length, moment, drafting = DraftLength([1]), 0.0, list[int]()
    counted, slots = CountedRests(length), np.arange(1)
    for step in range(2000):
        if step % 12 == 0:
            counted.add_row(0)
            moment += 50.0
        if not counted.rests(1, moment):
            length.limits(slots, 1, np.ones(1, np.int64))
            length.learn(slots, np.ones(1, np.int64), np.zeros(1, np.int64))
            drafting.append(step)
            moment += 1.0
        moment += 1.0
    assert 10 < len(drafting) < 200
    assert drafting[-1] > 1500


def test_what_a_proposer_reads_behind_every_sleep_counts_as_its_cost() -> None:
    length, moment, asked = DraftLength([1]), 0.0, 0
    counted, slots = CountedRests(length), np.arange(1)
    counted.add_row(0)
    slept = True
    for _ in range(40_000):
        rests = counted.rests(1, moment)
        if not rests:
            length.limits(slots, 1, np.ones(1, np.int64))
            reading = 60.0 if slept else 0.0
            length.learn(slots, np.ones(1, np.int64), np.zeros(1, np.int64), reading)
            moment += 0.1 + reading
            asked += 1
        slept, moment = rests, moment + 1.0
    assert asked > 10
    assert moment < 1.02 * 40_000
