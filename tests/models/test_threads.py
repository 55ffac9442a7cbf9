"""The thread count follows what was measured, is probed now and then, and is put back after each step."""

from collections import Counter

from troupellm.models.threads import LARGE_STEP_TOKENS, StepThreads


class Machine:
    """Time passes as a step's thread count says."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = {4: seconds["all_threads"], 1: seconds["one"]}
        self.now, self.threads = 0.0, 4
        self.chooser = StepThreads(4, set_threads=self.set_threads, clock=lambda: self.now)

    def set_threads(self, count: int) -> None:
        self.threads = count

    def run(self, steps: int, tokens: int = 1) -> Counter[int]:
        used: Counter[int] = Counter()
        for _ in range(steps):
            with self.chooser.step(tokens):
                used[self.threads] += 1
                self.now += self.seconds[self.threads]
            assert self.threads == 4
        return used


def test_a_quiet_machine_uses_all_threads() -> None:
    assert Machine(all_threads=1.0, one=2.0).run(1000)[4] > 980


def test_a_busy_machine_uses_one() -> None:
    assert Machine(all_threads=8.0, one=2.0).run(1000)[1] > 980


def test_a_machine_that_becomes_quiet_is_noticed() -> None:
    machine = Machine(all_threads=8.0, one=2.0)
    machine.run(100)
    machine.seconds[4] = 1.0
    machine.run(500)
    assert machine.run(100)[4] > 90


def test_large_steps_and_single_threads_are_left_alone() -> None:
    machine = Machine(all_threads=8.0, one=1.0)
    assert machine.run(50, tokens=LARGE_STEP_TOKENS) == {4: 50}
    single = StepThreads(1, set_threads=machine.set_threads)
    with single.step(1):
        assert machine.threads == 4


def test_sizes_are_judged_apart() -> None:
    machine = Machine(all_threads=8.0, one=1.0)
    machine.run(20, tokens=1)
    machine.seconds = {4: 1.0, 1: 8.0}
    assert machine.run(20, tokens=100)[4] > 15


def test_a_step_that_raises_puts_the_count_back() -> None:
    machine = Machine(all_threads=8.0, one=1.0)
    machine.run(5)
    try:
        with machine.chooser.step(1):
            assert machine.threads == 1
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert machine.threads == 4
