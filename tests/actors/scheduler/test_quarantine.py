"""Finds the request that killed the worker: suspects come back in halves, then alone; only the guilty one fails."""

from math import ceil, log2

import pytest

from troupellm.actors.engine.edges import SUPERVISION
from troupellm.actors.scheduler.quarantine import KILLS_TO_SUSPECT, PAROLE_TOKENS
from troupellm.protocol.errors import EngineStopped, RequestFailed
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.engines.inside import ledger_of
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, stream_of, submission

NO_STOPS: frozenset[int] = frozenset()


class Deadly(Harness):
    """A worker that dies of every plan for which `kills` is true."""

    def __init__(self, core, settings=None, *, poison=(), length=0) -> None:  # type: ignore[no-untyped-def]
        super().__init__(core, settings)
        self.poison = set(poison)
        """Requests that kill, once they have `length` tokens or more."""
        self.length = length
        self.deaths: list[set[int]] = []
        self.in_a_row = self.most_in_a_row = 0
        self.exhausted = False

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            sequences = ledger_of(self.core).sequences
            guilty = [
                row
                for row in plan.rows
                if row // 100 in self.poison and row in sequences and len(sequences[row].tokens) >= self.length
            ]
            if guilty:
                self.deaths.append({row // 100 for row in plan.rows})
                self.in_a_row += 1
                self.most_in_a_row = max(self.most_in_a_row, self.in_a_row)
                self.lose(exhausted=self.exhausted)
        return plan

    def finish(self):  # type: ignore[no-untyped-def]
        self.in_a_row = 0
        return super().finish()

    def step(self) -> bool:
        plan = self.plan()
        if self.oracle.pending:
            self.finish()
            return True
        return plan is not None


def prompt(request: int) -> list[int]:
    return [request, 2, 3]


def check_innocents(harness: Deadly, requests: range, *, rows: int = 1) -> None:
    for request in requests:
        if request in harness.poison:
            error = harness.reader.closed[request].error
            assert isinstance(error, RequestFailed)
            assert error.code == "engine_request_failed"
            continue
        assert harness.reader.closed[request].error is None
        for row in range(100 * request, 100 * request + rows):
            assert harness.reader.streams[row] == stream_of(prompt(request), row % 100, 8, NO_STOPS)
    harness.assert_idle()
    assert harness.core.snapshot().quarantined == 0


@pytest.mark.parametrize("crowd", [2, 3, 8, 13])
@pytest.mark.parametrize("length", [0, 6])
@pytest.mark.parametrize("plans", [1, 2])
def test_one_poison_request_in_a_crowd(crowd: int, length: int, plans: int) -> None:
    for guilty in range(1, crowd + 1):
        harness = Deadly(make_core(max_plans_in_flight=plans), poison={guilty}, length=length)
        for request in range(1, crowd + 1):
            harness.submit(submission(request, prompt(request)))
        harness.run()
        check_innocents(harness, range(1, crowd + 1))
        assert len(harness.deaths) <= 1 + ceil(log2(crowd)) + 1
        assert harness.deaths[-1] == {guilty}
        assert harness.core.snapshot().blamed == 1
        assert harness.most_in_a_row <= 2


def test_alone_from_the_start_it_takes_two_deaths() -> None:
    harness = Deadly(make_core(), poison={1})
    harness.submit(submission(1, prompt(1)))
    harness.run()
    assert harness.deaths == [{1}, {1}]
    check_innocents(harness, range(1, 2))


def test_two_poison_requests_are_both_found() -> None:
    harness = Deadly(make_core(), poison={2, 7})
    for request in range(1, 9):
        harness.submit(submission(request, prompt(request)))
    harness.run()
    check_innocents(harness, range(1, 9))
    assert harness.core.snapshot().blamed == 2


def test_forks_of_a_request_are_judged_together() -> None:
    harness = Deadly(make_core(), poison={2})
    for request in range(1, 4):
        harness.submit(submission(request, prompt(request), rows=3))
    harness.run()
    check_innocents(harness, range(1, 4), rows=3)


def test_suspects_of_a_kill_are_computed_without_other_requests() -> None:
    harness = Deadly(make_core(), poison={1}, length=6)
    harness.submit(submission(1, prompt(1)))
    while not harness.deaths:
        harness.step()
    harness.submit(submission(2, prompt(2)))
    harness.submit(submission(3, prompt(3)))
    harness.run()
    assert harness.deaths[1:] == [{1}]
    check_innocents(harness, range(1, 4))


def test_bad_luck_is_forgiven() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, prompt(1)))
    for _ in range(3):
        harness.plan()
        harness.lose()  # each time it is alone, and each time it gets past that point at the second attempt
        harness.step()
    harness.run()
    assert harness.reader.streams[100] == stream_of(prompt(1), 0, 8, NO_STOPS)
    assert harness.core.snapshot().blamed == 0


class Postponing(Deadly):
    """The guilty gets `gain` tokens further each time before it kills."""

    def __init__(self, core, *, poison, gain: int) -> None:  # type: ignore[no-untyped-def]
        super().__init__(core, poison=poison, length=6)
        self.gain = gain

    def lose(self, reason: str = "it died", *, fault: bool = True, exhausted: bool = False) -> None:
        guilty = [s for s in ledger_of(self.core).sequences.values() if s.request.number in self.poison]
        self.length = max(len(sequence.tokens) for sequence in guilty) + self.gain
        super().lose(reason, fault=fault, exhausted=exhausted)


@pytest.mark.parametrize("gain", [1, 2, 3])
@pytest.mark.parametrize("crowd", [1, 2, 5, 8])
def test_a_request_that_kills_later_at_every_attempt_is_found(crowd: int, gain: int) -> None:
    harness = Postponing(make_core(max_plans_in_flight=2), poison={crowd}, gain=gain)
    for request in range(1, crowd + 1):
        harness.submit(submission(request, prompt(request), max_tokens=50))
    harness.run()
    assert isinstance(harness.reader.closed[crowd].error, RequestFailed)
    assert len(harness.deaths) <= 4 + 2 * ceil(log2(crowd) + 1)
    for request in range(1, crowd):
        assert harness.reader.closed[request].error is None
        assert harness.reader.streams[100 * request] == stream_of(prompt(request), 0, 50, NO_STOPS)
    harness.assert_idle()


def test_a_request_that_ran_for_long_after_a_loss_is_no_suspect() -> None:
    core = make_core(ready(num_blocks=200, max_model_len=700))
    harness = Harness(core, ready(num_blocks=200, max_model_len=700))
    harness.submit(submission(1, prompt(1), max_tokens=600))
    while harness.step():
        if len(harness.plans) % (PAROLE_TOKENS + 4) == 0:
            harness.plan()
            harness.lose()
    assert harness.core.snapshot().worker_losses >= 7
    assert harness.core.snapshot().blamed == 0
    assert len(harness.reader.streams[100]) == 600


def test_kills_from_outside_count_against_nobody() -> None:
    harness = Harness(make_core())
    for request in range(1, 4):
        harness.submit(submission(request, prompt(request), max_tokens=30))
    for _ in range(20):
        harness.plan()
        harness.lose(fault=False)
        assert harness.core.snapshot().quarantined == 0
        harness.step()
    harness.run()
    for request in range(1, 4):
        assert harness.reader.streams[100 * request] == stream_of(prompt(request), 0, 30, NO_STOPS)


def test_kills_in_a_row_before_anybody_got_anywhere_cost_nobody_a_request() -> None:
    harness = Harness(make_core())
    for request in range(1, 4):
        harness.submit(submission(request, prompt(request)))
    for kills in range(1, KILLS_TO_SUSPECT + 1):
        harness.plan()
        harness.lose(fault=False)
        assert harness.core.snapshot().quarantined == (3 if kills == KILLS_TO_SUSPECT else 0)
    harness.run()
    for request in range(1, 4):
        assert harness.reader.streams[100 * request] == stream_of(prompt(request), 0, 8, NO_STOPS)
    assert harness.core.snapshot().blamed == harness.core.snapshot().quarantined == 0


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_kills_that_let_few_steps_pass_cost_nobody_a_request(steps: int, plans: int) -> None:
    """However unlucky those are whose turn never comes before the next kill."""
    harness = Harness(make_core(caching=False, max_num_batched_tokens=16, max_plans_in_flight=plans))
    for request in range(1, 9):
        harness.submit(submission(request, prompt(request)))
    for _ in range(300):
        for _ in range(steps):
            harness.step()
        if harness.plan() is None and not harness.oracle.pending:
            break
        harness.lose(fault=False)
    for request in range(1, 9):
        assert harness.reader.streams[100 * request] == stream_of(prompt(request), 0, 8, NO_STOPS)
    assert harness.core.snapshot().blamed == 0
    harness.assert_idle()


class Killed(Deadly):
    """Each death looks like a kill from outside."""

    def lose(self, reason: str = "it died", *, fault: bool = True, exhausted: bool = False) -> None:
        super().lose(reason, fault=False, exhausted=exhausted)


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("crowd", [1, 2, 5, 8])
def test_a_request_among_repeated_kills_is_found_within_the_restart_limit(crowd: int, plans: int) -> None:
    for guilty in range(1, crowd + 1):
        harness = Killed(make_core(max_plans_in_flight=plans), poison={guilty})
        for request in range(1, crowd + 1):
            harness.submit(submission(request, prompt(request)))
        harness.run()
        check_innocents(harness, range(1, crowd + 1))
        assert harness.core.snapshot().blamed == 1
        assert harness.deaths[-1] == {guilty}
        assert harness.most_in_a_row < SUPERVISION["worker"].intensity.restarts


def test_a_suspect_whose_reader_is_away_holds_up_nobody() -> None:
    harness = Deadly(make_core(), poison={2})
    for request in range(1, 5):
        harness.submit(submission(request, prompt(request)))
    harness.plan()
    harness.core.pause(2)
    harness.run()
    assert set(harness.reader.closed) == {1, 3, 4}
    assert harness.core.snapshot().quarantined == 1
    harness.submit(submission(5, prompt(5)))
    harness.step()
    harness.core.resume(2)
    harness.run()
    check_innocents(harness, range(1, 6))


def test_aborted_suspects_are_forgotten() -> None:
    harness = Deadly(make_core(), poison={1, 2})
    harness.submit(submission(1, prompt(1)))
    harness.submit(submission(2, prompt(2)))
    harness.plan()
    assert harness.core.snapshot().quarantined == 2
    harness.abort(1)
    harness.abort(2)
    harness.submit(submission(3, prompt(3)))
    harness.run()
    assert harness.core.snapshot().quarantined == 0
    assert harness.core.snapshot().blamed == 0
    harness.assert_idle()


def test_suspects_fit_beside_those_who_were_cleared() -> None:
    settings = ready(num_blocks=6, block_size=2, max_model_len=12)
    harness = Deadly(make_core(settings, caching=False), settings, poison={3})
    for request in range(1, 5):
        harness.submit(submission(request, prompt(request), max_tokens=7))
    harness.run()
    for request in (1, 2, 4):
        assert harness.reader.streams[100 * request] == stream_of(prompt(request), 0, 7, NO_STOPS)
    assert isinstance(harness.reader.closed[3].error, RequestFailed)
    harness.assert_idle()


def test_a_request_too_large_for_the_memory_may_be_sent_again() -> None:
    harness = Deadly(make_core(), poison={1})
    harness.exhausted = True
    harness.submit(submission(1, prompt(1)))
    harness.submit(submission(2, prompt(2)))
    harness.run()
    error = harness.reader.closed[1].error
    assert isinstance(error, EngineStopped)
    assert (error.code, error.retryable) == ("server_is_overloaded", True)
    assert harness.reader.streams[200] == stream_of(prompt(2), 0, 8, NO_STOPS)
    harness.assert_idle()
