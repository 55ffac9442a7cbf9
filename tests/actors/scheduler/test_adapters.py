"""Sequences of adapters wait until the worker has their adapter and a slot is free; others do not wait for them."""

import random

import pytest

from troupellm.actors.scheduler.adapter_gate import PATIENCE_SECONDS, REVIEW_SECONDS
from troupellm.protocol.errors import AdapterError, EngineStopped
from troupellm.protocol.messages.adapter_library import DropAdapter, ServeAdapter
from troupellm.protocol.messages.adapters import AdapterPreparation
from troupellm.protocol.messages.scheduler import WorkerLost
from troupellm.tests.support.scheduler.adapter_requests import PROMPT, AdapterHarness, adapter
from troupellm.tests.support.scheduler.oracle import ready, stream_of

WHOLE = stream_of(PROMPT, 0, 8, frozenset())


def test_an_adapter_is_read_once_before_a_plan_names_it() -> None:
    harness = AdapterHarness()
    harness.answers = False
    harness.ask(1, "sql")
    harness.ask(2, "sql")
    harness.ask(3)
    harness.run()
    assert {row for plan in harness.plans for row in plan.rows} == {300}
    (asked,) = harness.take_asks()
    assert asked == ServeAdapter("digest of sql", "/adapters/sql")
    harness.answer(asked)
    harness.run()
    assert harness.reader.streams[100] == harness.reader.streams[200] == WHOLE
    assert [plan.adapters for plan in harness.plans if plan.adapters] != []
    assert sum(len(plan.adapters) for plan in harness.plans) == 1
    harness.assert_idle()


def test_rows_of_several_adapters_and_of_the_model_run_together() -> None:
    harness = AdapterHarness(max_loras=3)
    for request, name in enumerate(["a", "b", "", "c", "a"], start=1):
        harness.ask(request, name)
    harness.run()
    assert max(len(plan.rows) for plan in harness.plans) == 5
    assert all(harness.reader.streams[100 * request] == WHOLE for request in range(1, 6))
    harness.assert_idle()


def test_a_sequence_without_a_slot_is_passed_over() -> None:
    harness = AdapterHarness(max_loras=1)
    harness.ask(1, "a")
    harness.ask(2, "b")
    harness.ask(3)
    harness.ask(4, "a")
    harness.step()
    harness.step()
    assert set(harness.plans[-1].rows) == {100, 300, 400}
    assert harness.names() == (("a",), ("b",))
    assert harness.core.snapshot().waiting == 1
    harness.run()
    assert harness.reader.streams[200] == WHOLE
    harness.assert_idle()


def test_an_adapter_keeps_its_slot_until_another_one_needs_it() -> None:
    harness = AdapterHarness(max_loras=2)
    for request, name in enumerate(["a", "b", "a", "c", "b", "a"], start=1):
        harness.ask(request, name)
        harness.run()
    changes = [(change.slot, change.digest[-1]) for plan in harness.plans for change in plan.adapters]
    assert changes == [(1, "a"), (2, "b"), (2, "c"), (1, "b"), (2, "a")]


def test_an_adapter_whose_requests_keep_coming_makes_room_for_one_that_waits() -> None:
    harness = AdapterHarness(max_loras=1)
    harness.ask(1, "a", max_tokens=20)
    harness.step()
    harness.ask(2, "b")
    for request in range(3, 40):
        harness.ask(request, "a", max_tokens=20)
        harness.step()
        if 2 in harness.reader.closed:
            break
    assert harness.reader.streams[200] == WHOLE
    assert request < 36
    harness.run()
    assert all(number in harness.reader.closed for number in range(1, request + 1))
    harness.assert_idle()


def test_an_adapter_has_its_slot_for_a_while_before_it_makes_room() -> None:
    harness = AdapterHarness(max_loras=1)
    harness.ask(1, "a")
    harness.step()
    harness.ask(2, "b")
    harness.now -= 2.0 - PATIENCE_SECONDS / 2  # the next plan comes half of the time later
    harness.core.plan(harness.now)
    harness.ask(3, "a")
    assert harness.core.adapters is not None
    assert [slot.closed for slot in harness.core.adapters.slots] == [False]


def test_a_slot_whose_readers_do_not_read_is_given_to_an_adapter_that_waits() -> None:
    harness = AdapterHarness(max_loras=1)
    harness.ask(1, "a")
    harness.step()
    harness.core.pause(1)
    harness.run()
    harness.ask(2, "b")
    harness.run()
    assert harness.core.next_deadline is None
    assert harness.reader.streams[200] == WHOLE
    harness.core.resume(1)
    harness.run()
    assert harness.reader.streams[100] == WHOLE
    harness.assert_idle()


def test_waiting_for_a_slot_alone_asks_for_another_plan() -> None:
    harness = AdapterHarness(max_loras=1)
    harness.ask(1, "a")
    harness.step()
    harness.core.pause(1)
    harness.step()
    harness.ask(2, "b", arrival=harness.now + 3)
    harness.step()
    deadline = harness.core.next_deadline
    assert deadline is not None
    assert harness.now < deadline <= harness.now + 1


@pytest.mark.parametrize("beams", [False, True])
def test_siblings_begin_in_a_slot_that_is_closed(beams: bool) -> None:
    harness = AdapterHarness(max_loras=1)
    harness.ask(1, "a", rows=3, beams=beams, max_tokens=24)
    harness.step()
    harness.ask(2, "b")
    harness.run()
    assert set(harness.reader.closed) == {1, 2}
    harness.assert_idle()


def test_beams_of_adapters_survive_preemption() -> None:
    harness = AdapterHarness(max_loras=1, settings=ready(num_blocks=24, max_loras=1))
    harness.ask(1, "a", rows=3, beams=True, max_tokens=20)
    harness.ask(2, "b", rows=2, beams=True, max_tokens=20)
    harness.ask(3, max_tokens=40)
    harness.run()
    assert set(harness.reader.closed) == {1, 2, 3}
    assert not any(closed.error for closed in harness.reader.closed.values())
    harness.assert_idle()


def test_a_new_worker_reads_an_adapter_before_its_row_is_replayed() -> None:
    harness = AdapterHarness()
    harness.ask(1, "a")
    harness.ask(2)
    harness.step()
    harness.answers = False
    harness.lose(fault=False)
    before = len(harness.plans)
    harness.step()
    assert all(plan.rows == (200,) for plan in harness.plans[before:])
    (asked,) = harness.take_asks()
    harness.answer(asked, epoch=0)  # of the worker before
    harness.step()
    assert all(plan.rows == (200,) for plan in harness.plans[before:])
    harness.answer(asked)
    harness.run()
    assert harness.reader.streams[100] == harness.reader.streams[200] == WHOLE
    harness.assert_idle()


@pytest.mark.parametrize(("outcome", "error"), [("refused", AdapterError), ("late", EngineStopped)])
def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(outcome: str, error: type[Exception]) -> None:
    harness = AdapterHarness()
    harness.answers = False
    harness.ask(1, "a", rows=2)
    harness.ask(2, "b")
    harness.step()
    for asked in harness.take_asks():
        bad = AdapterPreparation(outcome=outcome, error="adapter_model.safetensors: it is cut short")
        harness.answer(asked, bad) if asked.digest == adapter("a").digest else harness.answer(asked)
    harness.run()
    assert isinstance(harness.reader.closed[1].error, error)
    assert "cut short" in str(harness.reader.closed[1].error)
    assert harness.reader.streams[200] == WHOLE
    harness.assert_idle()


def test_a_worker_that_is_gone_is_asked_again_after_a_while() -> None:
    harness = AdapterHarness()
    harness.answers = False
    harness.ask(1, "a")
    harness.step()
    (asked,) = harness.take_asks()
    harness.answer(asked, AdapterPreparation(outcome="gone"))
    harness.core.plan(harness.now)
    assert harness.take_asks() == []
    assert harness.core.next_deadline == harness.now + REVIEW_SECONDS
    harness.step()
    assert harness.take_asks() == [asked]
    harness.answer(asked)
    harness.run()
    assert harness.reader.streams[100] == WHOLE


def test_an_adapter_that_was_asked_for_between_two_workers_is_asked_for_again() -> None:
    harness = AdapterHarness()
    gate = harness.core.adapters
    assert gate is not None
    harness.ask(1)
    harness.step()
    harness.core.lose_worker(WorkerLost("it died", fault=False))
    harness.oracle.reset()
    gate.want(adapter("a").digest, "/a")
    (asked,) = harness.take_asks()
    harness.answer(asked, AdapterPreparation(outcome="gone"))
    harness.core.worker_restarted(harness.settings)
    harness.ask(2, "a")
    harness.run()
    assert harness.reader.streams[200] == WHOLE


def test_what_a_worker_that_was_started_over_has_read_for_the_time_before_is_dropped() -> None:
    harness = AdapterHarness()
    harness.answers = False
    harness.ask(1, "a")
    harness.ask(2, "b")
    harness.step()
    asked = harness.take_asks()
    harness.lose(fault=False)
    harness.core.abort(1)
    for ask in asked:
        harness.answer(ask, epoch=0)
    harness.answers = True
    harness.run()
    assert harness.worker.host == {adapter("b").digest}
    assert harness.reader.streams[200] == WHOLE
    harness.assert_idle()


def test_host_memory_holds_no_more_adapters_than_it_may() -> None:
    harness = AdapterHarness(max_loras=2, max_cpu_loras=2)
    names = "abcdefg"
    for request, name in enumerate(names * 3, start=1):
        harness.ask(request, name)
    harness.run(most=5000)
    assert len(harness.reader.closed) == 21
    assert harness.most_host <= 2
    assert any(isinstance(asked, DropAdapter) for asked in harness.asks)
    harness.assert_idle()


def test_one_slot_and_one_place_in_host_memory_serve_many_adapters() -> None:
    harness = AdapterHarness(max_loras=1, max_cpu_loras=1)
    for request in range(1, 13):
        harness.ask(request, "abcd"[request % 4], rows=1 + request % 2)
    harness.run(most=5000)
    assert len(harness.reader.closed) == 12
    assert harness.most_host == 1
    harness.assert_idle()


def test_an_adapter_that_no_request_needs_yet_takes_the_place_of_the_oldest() -> None:
    harness = AdapterHarness(max_loras=1, max_cpu_loras=1)
    harness.ask(1, "a")
    harness.run()
    gate = harness.core.adapters
    assert gate is not None
    for _ in range(2):  # the second one is there: the worker says so at once
        gate.want(adapter("b").digest, "/b")
        asks = harness.take_asks()
        assert asks[-1] == ServeAdapter(adapter("b").digest, "/b")
        assert asks[:-1] in ([], [DropAdapter(adapter("a").digest)])
        for asked in asks:
            harness.answer(asked)
    assert harness.most_host == 1


def test_an_adapter_that_no_request_needs_waits_for_those_that_requests_need() -> None:
    harness = AdapterHarness(max_loras=1, max_cpu_loras=1)
    harness.ask(1, "a")
    harness.step()
    harness.ask(2, "b")
    harness.step()
    gate = harness.core.adapters
    assert gate is not None
    gate.want(adapter("c").digest, "/c")
    assert harness.take_asks() == []
    harness.run()
    assert set(harness.reader.closed) == {1, 2}
    assert ServeAdapter(adapter("c").digest, "/c") in harness.asks
    assert harness.most_host == 1


def test_fifty_adapters_that_come_in_turns_wait_alike_for_four_slots() -> None:
    harness = AdapterHarness(max_loras=4, settings=ready(num_blocks=400, max_loras=4), max_num_seqs=32)
    arrivals: dict[int, float] = {}
    for request in range(1, 501):
        arrivals[request] = harness.now
        harness.ask(request, f"lora-{request % 50}")
        harness.step()
    harness.run(most=5000)
    waits = [harness.reader.closed[request].scheduled - arrival for request, arrival in arrivals.items()]
    assert max(waits) <= 3 * sum(waits) / len(waits)
    harness.assert_idle()


def test_requests_that_end_while_they_wait_leave_nothing() -> None:
    harness = AdapterHarness(max_loras=1)
    harness.ask(1, "a")
    harness.ask(2, "b")
    harness.ask(3, "c", deadline=2.5)
    harness.step()
    harness.abort(2)
    harness.run()
    assert set(harness.reader.closed) == {1, 2, 3}
    assert harness.names() == ((), ())
    harness.assert_idle()


def test_blocks_of_one_adapter_are_not_found_by_another_or_by_the_model() -> None:
    harness = AdapterHarness(caching=True)
    for request, name in enumerate(["a", "", "b", "a"], start=1):
        harness.ask(request, name, max_tokens=12)
        harness.run()
    assert harness.core.snapshot().prefix_hits == 4


@pytest.mark.parametrize("host", [1, 4])
def test_suspects_of_several_adapters_are_tried_one_after_the_other(host: int) -> None:
    harness = AdapterHarness(max_loras=1, max_cpu_loras=host)
    for request, name in enumerate("abca", start=1):
        harness.ask(request, name)
    harness.step()
    harness.lose()
    harness.run()
    assert len(harness.reader.closed) == 4
    assert not any(closed.error for closed in harness.reader.closed.values())
    harness.assert_idle()


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_leaves_no_slot_in_use(seed: int) -> None:
    random_ = random.Random(seed)
    harness = AdapterHarness(
        max_loras=2, max_cpu_loras=3, settings=ready(num_blocks=24, max_loras=2), caching=True, max_plans_in_flight=2
    )
    open_requests: list[int] = []
    for request in range(1, 60):
        name = random_.choice(["", "a", "b", "c", "d", "e"])
        beams = random_.random() < 0.1
        harness.ask(request, name, rows=random_.choice([1, 1, 2, 3]), beams=beams, max_tokens=random_.randint(1, 24))
        open_requests.append(request)
        for _ in range(random_.randint(0, 4)):
            harness.step()
        if random_.random() < 0.2:
            harness.abort(random_.choice(open_requests))
        if random_.random() < 0.15:
            harness.core.pause(random_.choice(open_requests))
        if random_.random() < 0.05:
            harness.lose(fault=False)
    for request in open_requests:
        harness.core.resume(request)
    harness.run(most=20_000)
    assert len(harness.reader.closed) == 59
    assert all(not slot.rows for slot in harness.core.adapters.slots)
    harness.assert_idle()
