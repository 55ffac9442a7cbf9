"""Drafts in a crowd whose rows come and go, on a simulated machine: never much slower than without, even if the
estimates miss a cost."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from troupellm.models.speculation.draft_length import DraftLength

MOST = 4


@dataclass(frozen=True)
class Machine:
    """The costs of a step, as parts of one without drafts; `hidden` is not seen by the thread that is asked for its
    time."""

    draft: float = 0.05
    """A draft, of a step of up to eight rows; of more it is a smaller part."""
    deciding: float = 0.1
    """The cost of each proposer that is awake."""
    verifying: float = 0.3
    """Any drafts at all."""
    following: float = 0.0
    """The cost of following the rows, unless asleep."""
    hidden: float = 0.0
    noise: float = 0.0
    first: float = 0.0
    """In the first steps with drafts."""


class Crowd:
    """Rows that write 64 to 128 tokens each, one behind the other, drafting or not. A prompt takes a step longer."""

    def __init__(self, machine: Machine, keep: float, rows: int, *, speculates: bool = True) -> None:
        self._machine, self._keep, self._rows = machine, keep, rows
        self._source = random.Random(5)
        self._length = DraftLength(range(1, MOST + 1), sleeps=machine.following > 0) if speculates else None
        self._wall = self._idled = self._spent = 0.0
        """By the disturbed clock; of it, what a proposer took in vain; and without what disturbs it."""
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
        took, drafts, told = 0.6 + 0.4 * size / self._rows + 0.5 * len(new), 0, 0.0
        kept = np.zeros(size, np.int64)
        slots, drafted = np.array(rows), np.zeros(size, np.int64)
        rests = True
        if length is not None:
            for row in new:
                length.add_row(row)
            rests = length.passes(size) or length.rests(size, self._wall - self._idled, mixed=bool(new))
            asleep = rests and length.asleep(size)
            for row in rows:
                self._able[row] = row in new or (self._able[row] and not asleep)
            if not rests:
                most = np.array([0 if row in new else min(MOST, left[row] - 1) for row in rows])
                asked = np.flatnonzero(most > 0)
                if asked.size:
                    drafted[asked] = length.limits(slots[asked], size, most[asked])
                drafted *= np.array([self._able[row] for row in rows])
                for place, limit in enumerate(drafted.tolist()):
                    while kept[place] < limit and self._source.random() < self._keep:
                        kept[place] += 1
                drafts = int(drafted.sum())
                told = machine.draft * drafts * min(1.0, 8 / self._rows) + machine.verifying * (drafts > 0)
                if drafts and self._warm:
                    self._warm, told = self._warm - 1, told + machine.first
            followed = 0.0 if asleep else machine.following
            took += told + followed + (0.0 if rests else machine.deciding + machine.hidden * (drafts > 0))
            self._idled += followed if rests else 0.0
        self._spent += took
        self._wall += took * (1 + machine.noise * self._source.random() ** 4)
        if length is not None and not rests:
            self.drafting_steps += drafts > 0
            length.learn(
                slots,
                drafted,
                kept,
                size + drafts + 40 * len(new),
                took - machine.hidden * (drafts > 0),
                following=machine.following,
            )
        for place, row in enumerate(rows):
            left[row] = max(0, left[row] - 1 - int(kept[place]))


DEAR = {
    "marginal": (Machine(), 0.35),
    "hidden": (Machine(hidden=1.0), 0.6),
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
@pytest.mark.parametrize(("speed", "pays"), [(0.97, False), (1.1, False), (1.4, True)])
def test_each_step_of_a_window_is_compared_with_those_of_as_many_rows(
    sizes: tuple[int, int], speed: float, pays: bool
) -> None:
    length, moment, drafting = DraftLength([1]), 0.0, 0
    for slot in range(32):
        length.add_row(slot)
    for step in range(500):
        rows = sizes[step % 2]
        slots, took = np.arange(rows), rows / 20
        if not length.passes(rows) and not length.rests(rows, moment):
            drafted = length.limits(slots, rows, np.ones(rows, np.int64))
            kept = drafted * (slots % 4 != 0)
            # The thread sees nothing of what drafts cost.
            length.learn(slots, drafted, kept, rows + int(drafted.sum()), took)
            if drafted.any():
                drafting += 1
                took *= (1 + kept.mean()) / speed
        moment += took
    assert drafting > 250 if pays else 3 <= drafting < 100


def _asleep(rows: int) -> tuple[DraftLength, float]:
    """For long, and when: no draft was kept."""
    length, slots, moment = DraftLength(range(1, 5), sleeps=True), np.arange(rows), 0.0
    for slot in range(rows):
        length.add_row(slot)
    while not length.asleep(rows):
        if not length.rests(rows, moment):
            drafted = length.limits(slots, rows, np.full(rows, 4))
            length.learn(slots, drafted, np.zeros(rows, np.int64), rows + int(drafted.sum()), 1.0)
        moment += 1.0
    return length, moment


@pytest.mark.parametrize("rows", [8, 32])
def test_most_steps_of_a_long_sleep_pass_unseen_and_it_is_as_long(rows: int) -> None:
    length, moment = _asleep(rows)
    usual = 0
    while length.asleep(rows):
        length.rests(rows, moment + usual)
        usual += 1
    length, moment = _asleep(rows)
    steps = passed = 0
    while length.asleep(rows):
        if length.passes(rows):
            passed += 1
        else:
            length.rests(rows, moment + steps)
        steps += 1
    assert steps == usual > 500
    assert 0.8 * usual < passed < usual
    assert not length.passes(rows), "all are awake"


def test_a_new_row_does_not_pass() -> None:
    length, moment = _asleep(8)
    assert not length.passes(8), "it is seen how the step before it ended"
    length.rests(8, moment)
    assert length.passes(8)
    length.add_row(3)
    assert not length.passes(8)
    length.rests(8, moment + 2.0, mixed=True)
    assert length.passes(8)
