"""The adaptive length against simulated texts and machines whose best length is known."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from troupellm.models.speculation.draft_length import DraftLength, StepSeconds
from troupellm.tests.support.speculation.counted_rests import CountedRests

Cost = Callable[[int, int], float]
SMALL_MODEL = {0: 1.0, 1: 1.11, 2: 1.18, 3: 1.25, 4: 1.27, 5: 1.36, 6: 1.6, 7: 1.88, 8: 1.89, 16: 2.61}
"""Seconds by drafts, of one row: as the built-in model's steps were measured to grow."""


def small_model(rows: int, drafts: int) -> float:
    return float(np.interp(drafts, list(SMALL_MODEL), list(SMALL_MODEL.values())))


def linear(rows: int, drafts: int) -> float:
    return 1 + 0.02 * rows + 0.06 * drafts


class Run:
    """Steps of rows whose drafts are kept with a probability each.

    Attributes:
        rate: tokens per second.
        given: drafts per step and row.
    """

    def __init__(
        self,
        cost: Cost,
        keep: Callable[[int, int], float],
        *,
        steps: int = 600,
        rows: int = 1,
        most: int = 8,
        asking: float = 0.0,
        offered: float = 1.0,
        noise: float = 0.0,
        levels: list[int] | None = None,
    ) -> None:
        source, length = random.Random(7), DraftLength(levels or range(1, most + 1))
        depths = {nodes: depth for depth, nodes in enumerate([0, *(levels or range(1, most + 1))])}
        slots, counted = np.arange(rows), CountedRests(length)
        for slot in range(rows):
            counted.add_row(slot)
        tokens, seconds, self.given = 0, 0.0, list[list[int]]()
        for step in range(steps):
            if counted.rests(rows, seconds):
                tokens, seconds = tokens + rows, seconds + cost(rows, 0) * (1 + noise * source.random())
                self.given.append([0] * rows)
                continue
            limits = length.limits(slots, rows, np.full(rows, most))
            drafted = np.array([limit if source.random() < offered else 0 for limit in limits.tolist()])
            accepted = np.zeros(rows, np.int64)
            for row in range(rows):
                while accepted[row] < depths[int(drafted[row])] and source.random() < keep(step, row):
                    accepted[row] += 1
            proposing = asking if limits.any() else 0.0
            took = (cost(rows, int(drafted.sum())) + proposing) * (1 + noise * source.random())
            if noise and source.random() < 0.01:
                took *= 10
            tokens, seconds = tokens + rows + int(accepted.sum()), seconds + took
            length.learn(slots, drafted, accepted, proposing)
            self.given.append(limits.tolist())
        self.rate = tokens / seconds


def best_rate(keep: float, most: int) -> float:
    """Of one row, whose every step has the same number of drafts."""
    return max(sum(keep**place for place in range(drafts + 1)) / small_model(1, drafts) for drafts in range(most + 1))


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("most", [5, 16])
@pytest.mark.parametrize("keep", [0.7, 0.85, 0.95, 1.0])
def test_the_best_length_is_found_within_a_few_steps(keep: float, most: int, noise: float) -> None:
    run = Run(small_model, lambda step, row: keep, most=most, noise=noise)
    usual = (1 + noise / 2) * (1.09 if noise else 1)  # of a step's length
    assert run.rate * usual > 0.9 * best_rate(keep, most)
    early = Run(small_model, lambda step, row: keep, most=most, noise=noise, steps=40)
    assert early.rate * usual > 0.6 * best_rate(keep, most)


@pytest.mark.parametrize("asking", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_drafts_that_never_match_end_at_once_and_cost_next_to_nothing(rows: int, asking: float) -> None:
    run = Run(linear, lambda step, row: 0.0, rows=rows, asking=asking)
    assert run.rate > 0.985 * rows / linear(rows, 0)
    assert sum(map(sum, run.given[:20])) <= 12 + 4 * rows
    assert sum(map(any, run.given[100:])) < 0.5 * len(run.given[100:])


def test_full_batches_do_not_draft_where_every_position_costs_its_share() -> None:
    run = Run(linear, lambda step, row: 0.9 if row % 2 else 0.05, rows=32)
    assert run.rate > 0.985 * 32 / linear(32, 0)


def test_each_row_has_its_own_length() -> None:
    run = Run(linear, lambda step, row: 0.95 if row else 0.05, rows=2, most=5)
    late = np.array(run.given[300:])
    assert np.median(late[:, 0]) == 0
    assert np.median(late[:, 1]) == 5
    assert run.rate > 1.5 * 2 / linear(2, 0)


def test_a_text_that_begins_to_match_is_noticed() -> None:
    run = Run(small_model, lambda step, row: 0.9 if step > 300 else 0.0, most=5)
    assert max(max(given) for given in run.given[300:450]) == 5
    assert np.median(run.given[450:]) == 5


def test_a_proposer_that_seldom_has_an_idea_is_asked_while_asking_costs_little() -> None:
    cheap = Run(small_model, lambda step, row: 0.95, most=5, offered=0.3, asking=0.01, steps=500)
    assert cheap.rate > 1.5
    dear = Run(small_model, lambda step, row: 0.95, most=5, offered=0.05, asking=0.5, steps=500)
    assert dear.rate > 0.98


def test_trees_are_cut_at_their_levels() -> None:
    run = Run(lambda rows, drafts: 1 + 0.05 * drafts, lambda step, row: 0.8, levels=[3, 6, 9], most=9)
    assert {nodes for step in run.given for nodes in step} <= {0, 3, 6, 9}
    assert np.median(run.given[50:]) > 3
    capped, moment = awake(DraftLength([3, 6, 9]), 1, 1.0)
    for _ in range(6):
        limits = capped.limits(np.array([0]), 1, np.array([8]))
        assert limits[0] in (0, 3, 6)
        capped.learn(np.array([0]), limits, np.minimum(limits // 3, 1))
        moment += 1.0
        capped.rests(1, moment)


def awake(length: DraftLength, rows: int, seconds: float) -> tuple[DraftLength, float]:
    """With so many rows, whose steps without drafts take so long; and the moment from which on they may draft."""
    for slot in range(rows):
        length.add_row(slot)
    moment = 0.0
    while steps := length.rests(rows, moment):
        moment += steps * seconds
    return length, moment


def test_a_new_row_begins_as_the_others_fared_and_inherits_nothing() -> None:
    length, moment = awake(DraftLength(range(1, 6)), 1, 1.0)
    slots = np.array([0])
    for _ in range(60):
        limits = length.limits(slots, 1, np.array([5]))
        length.learn(slots, limits, limits)
        moment += small_model(1, int(limits[0]))
        length.rests(1, moment)
    length.add_row(0)
    assert length.limits(slots, 1, np.array([5]))[0] >= 4
    assert length.limits(slots, 1, np.array([2]))[0] == 2


def test_prompts_in_a_step_are_no_measurement() -> None:
    slots, found = np.array([0]), []
    for prompts in (False, True):
        length, moment = awake(DraftLength(range(1, 6)), 1, 1.0)
        for step in range(60):
            limits = length.limits(slots, 1, np.array([5]))
            length.learn(slots, limits, limits)
            moment += small_model(1, int(limits[0]))
            if prompts and step % 3 == 0:
                length.rests(1, moment, mixed=True)
                moment += 40.0
            length.rests(1, moment)
        found.append(length.limits(slots, 1, np.array([5])).tolist())
    assert found[0] == found[1]


def test_the_same_observations_give_the_same_lengths() -> None:
    first, second = (Run(linear, lambda step, row: 0.6, rows=3, noise=0.3) for _ in range(2))
    assert first.given == second.given


def test_step_times_follow_the_machine_and_keep_their_shape() -> None:
    curve = StepSeconds(0.1)
    for _ in range(30):
        for drafts in (0, 2, 5):
            curve.learn(drafts, small_model(1, drafts))
    for drafts in (0, 1, 2, 3, 5):
        assert curve.of(np.array([float(drafts)]))[0] == pytest.approx(small_model(1, drafts), rel=0.03)
    for _ in range(60):  # the machine is half as fast now, and no step is without drafts
        curve.learn(5, 2 * small_model(1, 5))
    assert curve.level == pytest.approx(2.0, rel=0.1)
    values = curve.of(np.arange(0.0, 60.0))
    assert (np.diff(values) >= 0).all()


class Crowd:
    """Steps of the same rows, all of whose drafts are kept or none."""

    def __init__(self, rows: int, cost: Cost) -> None:
        self.length, self._rows, self._cost = DraftLength(range(1, 5), sleeps=True), rows, cost
        self._counted, self.moment = CountedRests(self.length), 0.0
        for slot in range(rows):
            self._counted.add_row(slot)

    def step(self, *, keeps: bool, rows: int | None = None) -> int | None:
        """The drafts; None where the proposer rests."""
        rows = rows or self._rows
        slots = np.arange(rows)
        if self._counted.rests(rows, self.moment):
            self.moment += self._cost(rows, 0)
            return None
        drafts = self.length.limits(slots, rows, np.full(rows, 4))
        self.moment += self._cost(rows, int(drafts.sum()))
        self.length.learn(slots, drafts, drafts if keeps else np.zeros_like(drafts))
        return int(drafts.sum())

    def add_row(self) -> None:
        self._counted.add_row(0)


def test_a_proposer_that_is_never_right_sleeps_nearly_always() -> None:
    crowd = Crowd(8, linear)
    given = [crowd.step(keeps=False) for _ in range(20_000)]
    assert given.count(None) > 19_000
    assert 20 < len(given) - given.count(None) < 600
    assert crowd.moment < 1.01 * 20_000 * linear(8, 0)
    assert all(crowd.step(keeps=False, rows=16) is None for _ in range(64)), "more rows are the same matter"
    woken = [crowd.step(keeps=False, rows=4) for _ in range(200)]
    assert any(each is not None for each in woken), "fewer rows are another one"


def test_a_new_row_wakes_a_proposer_that_has_slept_for_a_while() -> None:
    crowd, given = Crowd(1, lambda rows, drafts: 2.0 if drafts else 1.0), []
    for step in range(6000):
        if step % 100 == 0:
            crowd.add_row()
        given.append(crowd.step(keeps=step >= 2000) or 0)
    assert 3 < sum(map(bool, given[:2000])) < 40
    woken = next(step for step in range(2000, 6000) if given[step])
    assert woken % 100 < 2, "with a new row"
    assert np.mean(given[woken + 30 :]) > 3.3


def test_a_text_that_begins_to_match_wakes_the_proposer() -> None:
    crowd = Crowd(1, small_model)
    given = [crowd.step(keeps=step > 500) or 0 for step in range(4000)]
    assert sum(map(bool, given[300:500])) <= 6, "two looks"
    assert np.mean(given[3000:]) > 3.5


def test_what_drafts_have_earned_pays_for_a_stretch_without_matches() -> None:
    crowd = Crowd(1, lambda rows, drafts: 1.4 if drafts else 1.0)
    given = [crowd.step(keeps=not 400 <= step < 460) for step in range(700)]
    assert np.mean([each or 0 for each in given[100:400]]) > 3
    assert given[400:460].count(None) > 5
    assert np.mean([each or 0 for each in given[560:]]) > 3
