"""The adaptive length against simulated texts and machines whose best length is known."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from troupellm.models.speculation.draft_length import DraftLength, StepSeconds

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
        slots = np.arange(rows)
        for slot in range(rows):
            length.add_row(slot)
        tokens, seconds, self.given = 0, 0.0, list[list[int]]()
        for step in range(steps):
            if length.rests(rows, seconds):
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
            length.learn(slots, drafted, accepted, rows + int(drafted.sum()), took, proposing)
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
    capped = DraftLength([3, 6, 9])
    capped.add_row(0)
    for _ in range(6):
        limits = capped.limits(np.array([0]), 1, np.array([8]))
        assert limits[0] in (0, 3, 6)
        capped.learn(np.array([0]), limits, np.minimum(limits // 3, 1), 1 + int(limits[0]), 1.0)


def test_a_new_row_begins_as_the_others_fared_and_inherits_nothing() -> None:
    length = DraftLength(range(1, 6))
    slots = np.array([0])
    length.add_row(0)
    for _ in range(60):
        limits = length.limits(slots, 1, np.array([5]))
        length.learn(slots, limits, limits, 1 + int(limits[0]), small_model(1, int(limits[0])))
    length.add_row(0)
    assert length.limits(slots, 1, np.array([5]))[0] >= 4
    assert length.limits(slots, 1, np.array([2]))[0] == 2


def test_prompts_in_a_step_are_no_measurement() -> None:
    mixed, plain = DraftLength(range(1, 6)), DraftLength(range(1, 6))
    slots = np.array([0])
    for length in (mixed, plain):
        length.add_row(0)
        for step in range(100):
            limits = length.limits(slots, 1, np.array([5]))
            drafts = int(limits[0])
            length.learn(slots, limits, limits, 1 + drafts, small_model(1, drafts))
            if length is mixed and step % 3 == 0:
                length.learn(slots, np.zeros(1, np.int64), np.zeros(1, np.int64), 500, 40.0)
    assert mixed.limits(slots, 1, np.array([5])).tolist() == plain.limits(slots, 1, np.array([5])).tolist()


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


def test_what_drafts_cost_others_counts_by_the_wall() -> None:
    """Their thread sees a tenth of it: drafts that seem to pay do not, and end."""
    rates = {}
    for hidden in (0.0, 2.0):
        length, slots, wall, tokens = DraftLength(range(1, 5)), np.arange(8), 0.0, 0
        for slot in range(8):
            length.add_row(slot)
        source = random.Random(3)
        for _ in range(2000):
            drafts, rested = np.zeros(8, np.int64), length.rests(8, wall)
            if not rested:
                drafts = length.limits(slots, 8, np.full(8, 4))
            kept = np.array([min(limit, int(source.random() < 0.6)) for limit in drafts.tolist()])
            seconds = linear(8, int(drafts.sum()) // 4)
            wall += seconds + hidden * bool(drafts.any())
            tokens += 8 + int(kept.sum())
            if not rested:
                length.learn(slots, drafts, kept, 8 + int(drafts.sum()), seconds)
        rates[hidden] = tokens / wall * linear(8, 0) / 8
    assert rates[0.0] > 1.15
    assert rates[2.0] > 0.97


def test_a_proposer_that_costs_something_by_itself_sleeps_and_wakes() -> None:
    length, slots = DraftLength(range(1, 5), sleeps=True), np.arange(8)
    for slot in range(8):
        length.add_row(slot)
    asleep, looks, wall = 0, 0, 0.0
    for _ in range(20_000):
        if length.rests(8, wall):
            asleep += length.asleep(8)
            wall += linear(8, 0)
            continue
        assert not length.asleep(8)
        drafts = length.limits(slots, 8, np.full(8, 4))
        looks += 1
        wall += linear(8, int(drafts.sum()))
        length.learn(slots, drafts, np.zeros(8, np.int64), 8 + int(drafts.sum()), linear(8, 0))
    assert asleep > 19_000
    assert 30 < looks < 600
    assert length.asleep(8)
    assert length.asleep(16), "more rows are the same matter"
    for _ in range(64):
        length.rests(4, wall)
    assert not length.asleep(4), "fewer rows are another one"


def test_a_new_row_wakes_a_proposer_that_has_slept_for_a_while() -> None:
    length, slots, wall = DraftLength(range(1, 5), sleeps=True), np.zeros(1, np.int64), 0.0
    given, asleep = [], []
    for step in range(3000):
        if step % 100 == 0:
            length.add_row(0)
        drafts = np.zeros(1, np.int64)
        resting = length.rests(1, wall)
        asleep.append(resting and length.asleep(1))
        if resting:
            wall += small_model(1, 0)
        else:
            drafts = length.limits(slots, 1, np.full(1, 4))
            wall += small_model(1, int(drafts[0]))
            kept = drafts if step >= 1000 else np.zeros_like(drafts)
            length.learn(slots, drafts, kept, 1 + int(drafts[0]), small_model(1, int(drafts[0])))
        given.append(int(drafts[0]))
    assert sum(asleep[:1000]) > 700
    woken = next(step for step in range(1000, 3000) if given[step])
    assert woken % 100 < 8, "with a new row"
    assert np.mean(given[woken + 30 : 3000]) > 3.3
    assert not any(asleep[woken:])


def test_a_text_that_begins_to_match_wakes_the_proposer() -> None:
    length, slots, wall = DraftLength(range(1, 5), sleeps=True), np.zeros(1, np.int64), 0.0
    given = []
    length.add_row(0)
    for step in range(4000):
        drafts = np.zeros(1, np.int64)
        if length.rests(1, wall):
            wall += small_model(1, 0)
        else:
            drafts = length.limits(slots, 1, np.full(1, 4))
            wall += small_model(1, int(drafts[0]))
            kept = drafts if step > 500 else np.zeros_like(drafts)
            length.learn(slots, drafts, kept, 1 + int(drafts[0]), small_model(1, int(drafts[0])))
        given.append(int(drafts[0]))
    assert sum(map(bool, given[300:500])) <= 6, "two looks"
    assert np.mean(given[3000:]) > 3.5
