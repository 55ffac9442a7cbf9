"""The outbox: pieces merge, a slow reader pauses itself, and an abort that came too early is said again."""

from types import SimpleNamespace
from typing import Any

import pytest

from troupellm.actors.admission.admission import Admission
from troupellm.actors.engine.open_requests import OpenRequests
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.errors import EngineStopped, RequestAborted, RequestFailed
from troupellm.protocol.messages.input import Demand
from troupellm.protocol.messages.scheduler import AbortRequest, ReaderPaused, ReaderResumed
from troupellm.protocol.params.outputs import Delta, Timing, Usage
from troupellm.tests.support.environment.hand_clock import HandClock

USAGE = Usage(prompt_tokens=1, completion_tokens=2)


class Desk:
    def __init__(self, budget: int | None = 4) -> None:
        self.clock = HandClock(10.0)
        self.admission = Admission(SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=0), self.clock)
        self.reported: list[Any] = []
        self.ended: list[int] = []
        self.outbox = LocalOutbox(
            7,
            arrival=9.0,
            slot=self.admission.enter(Demand(sequences=1, tokens=1)),
            clock=self.clock,
            budget=budget,
            to_scheduler=self.reported.append,
            on_terminal=self.ended.append,
        )

    def push(self, count: int, **fields: Any) -> None:
        self.outbox.push(Delta(text="x" * count, token_ids=tuple(range(count)), **fields))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_pieces_merge_per_sequence(desk: Desk) -> None:
    desk.push(1)
    desk.push(1, index=1)
    desk.push(2, finish_reason="stop", stop_reason="x")
    first, second = desk.outbox.take(), desk.outbox.take()
    assert first == Delta(text="xxx", token_ids=(0, 0, 1), finish_reason="stop", stop_reason="x")
    assert second == Delta(index=1, text="x", token_ids=(0,))
    assert desk.outbox.take() is None


def test_a_slow_reader_pauses_and_resumes_at_half(desk: Desk) -> None:
    desk.push(4)
    assert desk.reported == []
    desk.push(1)
    desk.push(1)
    assert desk.reported == [ReaderPaused(7)]
    assert desk.outbox.paused_since == 10.0
    desk.outbox.take()
    assert desk.reported == [ReaderPaused(7), ReaderResumed(7)]
    assert desk.outbox.paused_since is None


@pytest.mark.parametrize(("left", "resumes"), [(1, True), (2, True), (3, False)])
def test_a_paused_reader_resumes_at_half_budget(desk: Desk, left: int, resumes: bool) -> None:
    desk.push(4)
    desk.push(left, index=1)
    assert desk.reported == [ReaderPaused(7)]
    desk.outbox.take()
    assert desk.reported == [ReaderPaused(7), *([ReaderResumed(7)] if resumes else [])]
    desk.outbox.take()
    assert desk.reported == [ReaderPaused(7), ReaderResumed(7)]


def test_a_reader_that_goes_on_after_the_end_resumes_nothing(desk: Desk) -> None:
    desk.push(5)
    desk.outbox.close(USAGE, None, None)
    desk.outbox.take()
    assert desk.reported == [ReaderPaused(7)]
    assert desk.outbox.paused_since is None


def test_without_a_budget_nothing_pauses() -> None:
    desk = Desk(budget=None)
    desk.push(1000)
    assert desk.reported == []


def test_the_end_gives_the_place_back(desk: Desk) -> None:
    desk.outbox.close(USAGE, 9.5, 9.75)
    desk.outbox.close(USAGE, None, None)
    desk.outbox.fail(RequestFailed("too late"))
    assert desk.outbox.error is None
    assert desk.outbox.timing == Timing(scheduled=0.5, first_token=0.75, finished=1.0)
    assert desk.ended == [7]
    desk.admission.enter(Demand(sequences=1, tokens=1))


def test_an_abort_is_repeated_until_the_scheduler_has_met_the_request(desk: Desk) -> None:
    desk.outbox.abort()
    desk.outbox.opened((1, 2))
    desk.push(1)
    desk.push(1, finish_reason="abort")
    assert desk.reported == [AbortRequest(7)] * 3
    assert desk.outbox.take() is None
    desk.outbox.fail(RequestFailed("aborted"))
    desk.outbox.abort()
    assert desk.reported == [AbortRequest(7)] * 3


def test_watchers_hear_of_the_end_once(desk: Desk) -> None:
    heard: list[str] = []
    desk.outbox.when_terminal(lambda: heard.append("before"))
    desk.outbox.close(USAGE, None, None)
    desk.outbox.when_terminal(lambda: heard.append("after"))
    assert heard == ["before", "after"]


def test_each_early_end_is_counted_once_under_its_cause() -> None:
    ended: list[str] = []
    clock = HandClock(10.0)
    admission = Admission(SchedulerConfig(max_num_seqs=4, max_num_queued_reqs=0), clock)
    requests = OpenRequests(clock, lambda message: None, ended.append)
    left, stalled, failed, complete = (
        requests.add(admission.enter(Demand(sequences=1, tokens=1)), 9.0, 8) for _ in range(4)
    )
    complete.close(USAGE, None, None)
    for _ in range(2):
        left.abort()
        complete.abort()
        requests.end(stalled, RequestAborted("stalled"), by="stall")
    requests.end(failed, RequestFailed("failed"))
    requests.end_all(lambda: EngineStopped("closed"), by="shutdown")
    assert ended == ["client", "stall"]


def test_pieces_are_taken_before_anybody_is_woken_but_for_ends(desk: Desk) -> None:
    woken, taken, willing = [], [], [True]
    outbox = desk.outbox
    outbox._on_wake = lambda _: woken.append(1)

    def take(deltas: list[Delta]) -> None:
        taken.append([delta.text for delta in deltas])

    outbox.set_sink(SimpleNamespace(ready=lambda: willing[0], take=take))
    desk.push(1)
    outbox.wake()
    desk.push(2)
    desk.push(1, index=1)
    outbox.wake()
    assert (taken, woken) == ([["x"], ["xx", "x"]], [])
    willing[0] = False
    desk.push(3)
    outbox.wake()
    assert (len(taken), woken) == (2, [1])
    willing[0] = True
    desk.push(1, finish_reason="stop")
    outbox.wake()
    assert (len(taken), woken) == (2, [1, 1])
    assert [delta.text for delta in outbox.take_all()] == ["xxxx"]
    desk.push(1)
    outbox.close(USAGE, None, None)
    assert not outbox.can_write_directly
