"""The thread count follows what was measured, is probed now and then, and is put back after each step."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from troupellm.models.runner import threads
from troupellm.models.runner.threads import LARGE_STEP_TOKENS, GivenThreads, StepThreads


class Machine:
    """Time passes as a step's thread count says, in milliseconds."""

    def __init__(self, **milliseconds: float) -> None:
        self.milliseconds = {4: milliseconds["all_threads"], 1: milliseconds["one"]}
        self.now, self.processor_now, self.threads = 0.0, 0.0, 4
        self.busy = False
        """Another program has a core, so that a thread waits for the others of a step without processor time."""
        self.chooser = StepThreads(
            4, set_threads=self.set_threads, clock=lambda: self.now, processor_clock=lambda: self.processor_now
        )

    def set_threads(self, count: int) -> None:
        self.threads = count

    def stall(self, seconds: float) -> None:
        """A step in which the process is stopped for a while."""
        with self.chooser.step(1):
            self.now += seconds

    def run(self, steps: int, tokens: int = 1) -> Counter[int]:
        used: Counter[int] = Counter()
        for _ in range(steps):
            with self.chooser.step(tokens):
                used[self.threads] += 1
                seconds = self.milliseconds[self.threads] / 1000 * (tokens if tokens >= LARGE_STEP_TOKENS else 1)
                self.now += seconds
                self.processor_now += seconds / 4 if self.busy and self.threads > 1 else seconds
            assert self.threads == 4
        return used


def test_a_quiet_machine_uses_all_threads() -> None:
    assert Machine(all_threads=1.0, one=2.0).run(1000)[4] > 980


def test_a_busy_machine_uses_one() -> None:
    assert Machine(all_threads=8.0, one=2.0).run(1000)[1] > 980


def test_a_machine_that_becomes_quiet_is_noticed() -> None:
    machine = Machine(all_threads=8.0, one=2.0)
    machine.run(100)
    machine.milliseconds[4] = 1.0
    machine.run(500)
    assert machine.run(100)[4] > 90


@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_a_step_in_which_the_process_was_stopped_changes_nothing(seconds: float) -> None:
    machine = Machine(all_threads=500.0, one=25.0)
    machine.run(100)
    machine.stall(seconds)
    begin = machine.now
    assert machine.run(200)[1] >= 199  # one probe at the most
    assert machine.now - begin < 200 * 0.025 + 0.5


def run_beside(machine: Machine, one_in: int, slices: int) -> Counter[int]:
    """One in so many steps waits for time slices, which takes 8 ms; others are as fast as on a quiet machine."""
    used: Counter[int] = Counter()
    quick = machine.milliseconds[4]
    for _ in range(slices):
        machine.milliseconds[4] = 8.0
        used += machine.run(1)
        machine.milliseconds[4] = quick
        used += machine.run(one_in - 1)
    return used


def test_a_busy_moment_now_and_then_changes_nothing() -> None:
    machine = Machine(all_threads=1.6, one=2.5)
    machine.run(20)
    used = run_beside(machine, 16, 30)
    assert used[4] > 0.9 * used.total()


def test_the_mean_of_steps_counts_beside_a_program_that_most_steps_do_not_notice() -> None:
    machine = Machine(all_threads=0.8, one=1.6)
    machine.run(20)
    begin = machine.now
    used = run_beside(machine, 3, 300)
    assert machine.now - begin < 1.15 * 0.0016 * used.total()


def test_waits_that_are_rarer_than_eight_short_steps_count() -> None:
    machine = Machine(all_threads=0.3, one=0.45)
    used: Counter[int] = Counter()
    begin = machine.now
    for _ in range(6000):
        machine.milliseconds[4] = 4.3 if used[4] % 12 == 11 else 0.3
        used += machine.run(1)
    assert machine.now - begin < 1.1 * 0.00045 * used.total()


def test_stalls_of_several_remembered_steps_count_in_full() -> None:
    machine = Machine(all_threads=0.2, one=0.8)
    used: Counter[int] = Counter()
    for _ in range(3000):
        machine.milliseconds[4] = 100.0 if used[4] % 8 in (1, 4, 7) else 0.2
        used += machine.run(1)
    assert used[1] > 2700


def test_steps_that_take_no_time_on_a_coarse_clock_are_accepted() -> None:
    machine = Machine(all_threads=0.0, one=0.0)
    assert machine.run(20, tokens=1).total() == machine.run(20, tokens=2).total() == 20


def test_all_threads_are_back_within_a_second_of_quiet() -> None:
    machine = Machine(all_threads=40.0, one=2.4)
    machine.run(1000)
    machine.milliseconds[4] = 1.6
    begin = machine.now
    while machine.run(3)[4] < 3:
        assert machine.now - begin < 1.5
    assert machine.run(100)[4] > 95


def test_a_first_step_that_was_stalled_is_not_believed() -> None:
    machine = Machine(all_threads=25.0, one=100.0)
    machine.stall(60.0)
    assert machine.run(100)[4] > 90


def test_steps_that_stay_slow_are_believed_after_a_few() -> None:
    machine = Machine(all_threads=60.0, one=25.0)
    machine.run(100)
    machine.milliseconds[1] = 5000.0
    assert machine.run(20)[4] > 15


def test_the_slower_choice_is_tried_again_by_the_time_that_passes() -> None:
    """Old measurements expire: here it was slow for a while, 5 s a step."""
    machine = Machine(all_threads=5000.0, one=1000.0)
    machine.run(20)
    machine.milliseconds[4] = 25.0
    used = machine.run(40)  # 15 s, and then the change is followed at once
    assert used[4] >= 20


@pytest.mark.parametrize("one", [0.1, 4.0])
def test_large_steps_of_a_quiet_machine_never_pay_for_a_trial(one: float) -> None:
    machine = Machine(all_threads=1.0, one=one)
    assert machine.run(200, tokens=LARGE_STEP_TOKENS) == {4: 200}
    assert machine.run(200, tokens=1000) == {4: 200}


def test_large_steps_beside_a_busy_program_use_one_thread_when_that_is_faster() -> None:
    machine = Machine(all_threads=0.3, one=0.05)
    machine.busy = True
    used = machine.run(30, tokens=1000) + machine.run(30, tokens=2000) + machine.run(30, tokens=130)
    assert used[1] >= 84
    slower = Machine(all_threads=0.05, one=0.1)
    slower.busy = True
    assert slower.run(100, tokens=1000)[4] >= 94


def test_large_steps_take_all_threads_again_when_the_machine_is_quiet() -> None:
    machine = Machine(all_threads=0.3, one=0.05)
    machine.busy = True
    machine.run(50, tokens=1000)
    machine.busy, machine.milliseconds[4] = False, 0.02
    begin = machine.now
    while machine.run(1, tokens=1000)[1]:
        assert machine.now - begin < 16.0
    assert machine.run(50, tokens=1000) == {4: 50}


def test_a_long_step_that_stood_still_is_not_tried_with_one_thread() -> None:
    machine = Machine(all_threads=1.0, one=4.0)
    machine.busy = True
    assert machine.run(100, tokens=1000) == {4: 100}


def test_long_steps_take_the_one_thread_that_was_faster_for_shorter_ones() -> None:
    machine = Machine(all_threads=0.3, one=0.05)
    machine.busy = True
    machine.run(20, tokens=1000)
    assert machine.run(200, tokens=8000)[1] >= 180


def test_single_threads_are_left_alone() -> None:
    machine = Machine(all_threads=8.0, one=1.0)
    single = StepThreads(1, set_threads=machine.set_threads)
    with single.step(1):
        assert machine.threads == 4


def test_a_steady_number_is_left_alone() -> None:
    changed: list[int] = []
    chooser = StepThreads(4, steady=True, set_threads=changed.append)
    for tokens in [1, 5, LARGE_STEP_TOKENS - 1] * 10:
        with chooser.step(tokens):
            pass
    assert not changed


def test_sizes_are_judged_apart() -> None:
    machine = Machine(all_threads=1.0, one=8.0)
    machine.run(20, tokens=1)
    machine.milliseconds = {4: 8.0, 1: 1.0}
    assert machine.run(20, tokens=100)[1] > 15


def test_steps_of_a_new_size_begin_with_one_thread_where_that_was_faster_for_others() -> None:
    machine = Machine(all_threads=300.0, one=2.0)
    machine.run(20, tokens=1)
    begin = machine.now
    assert machine.run(100, tokens=2) == machine.run(100, tokens=16) == {1: 100}
    assert machine.now - begin < 0.5
    machine.milliseconds[4] = 1.0
    while machine.run(1, tokens=16)[1]:
        assert machine.now - begin < 16.0
    assert machine.run(100, tokens=16)[4] > 90


def test_a_ratio_below_the_number_of_threads_tells_only_about_steps_of_about_that_size() -> None:
    machine = Machine(all_threads=8.0, one=4.0)
    machine.run(20, tokens=1)
    assert machine.run(2, tokens=2) == {1: 2}
    assert machine.run(1, tokens=16) == {4: 1}


def test_a_step_that_raises_puts_the_count_back() -> None:
    machine = Machine(all_threads=8.0, one=1.0)
    machine.run(5)
    try:
        with machine.chooser.step(1):
            assert machine.threads == 1
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert machine.threads == 4


HOST = 3
"""Threads that the process computes with."""


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ThreadPoolExecutor]]:
    """Threads that have computed nothing yet, one each."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_given", [])
    torch.set_num_threads(HOST)
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(4)]
    finally:
        torch.set_num_threads(before)


def given(line: ThreadPoolExecutor, number: int | None) -> GivenThreads:
    return line.submit(GivenThreads, number).result()


def number_of(line: ThreadPoolExecutor) -> int:
    return line.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("first", [1, 2, None])
def test_an_engine_without_a_number_computes_with_what_the_process_had_whatever_others_do(
    lines: list[ThreadPoolExecutor], first: int | None
) -> None:
    assert given(lines[0], first).number == (first or HOST)
    lines[0].submit(torch.set_num_threads, 1).result()  # as in a step that is quicker with one
    assert given(lines[1], None).number == HOST
    assert number_of(lines[1]) == HOST
    assert given(lines[2], 2).number == number_of(lines[2]) == 2
    assert number_of(lines[0]) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize("numbers", [(1, None, 2), (None, 2, None), (None, None, 1), (2, 1, None)])
def test_what_the_process_had_is_put_back_in_whatever_order_engines_end(
    lines: list[ThreadPoolExecutor], numbers: tuple[int | None, ...], order: tuple[int, ...]
) -> None:
    engines = []
    for line, number in zip(lines, numbers, strict=False):
        engines.append(given(line, number))
        line.submit(torch.set_num_threads, 1).result()  # a step of it begins
    for line, engine in zip(lines, engines, strict=False):
        line.submit(torch.set_num_threads, engine.number).result()  # and ends
    for index in order:
        lines[index].submit(engines[index].put_back).result()
    assert number_of(lines[3]) == HOST


def test_an_engine_alone_without_a_number_sets_none(
    lines: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        raise AssertionError(f"{number} threads were set")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", refuse)
        engine = given(lines[0], None)
        assert engine.number == HOST
        lines[0].submit(engine.put_back).result()
