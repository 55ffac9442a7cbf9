"""Many distinct guides at once: each is built once, none within a step, and those of ended requests are forgotten."""

import gc
from collections import OrderedDict

from troupellm.actors.guide.fair_queue import SMALL_BYTES
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.actors.scheduler.guide_gate import MOST_OPEN, BuildQueue, program_key
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.messages.guide import BuildGuide
from troupellm.protocol.params.guide import MOST_PROGRAMS, GuideProgram
from troupellm.tests.support.scheduler.guided_requests import answer, guided, harness_of
from troupellm.tests.support.scheduler.oracle import Harness, ready, submission


def program(text: str) -> GuideProgram:
    return GuideProgram(backend="llguidance", text=text)


def test_each_of_many_guides_is_built_once_and_the_first_request_ends_first() -> None:
    harness, num_builds = harness_of(max_num_seqs=4), 0
    for number in range(1, 101):
        harness.submit(guided(number, f"grammar {number}", max_tokens=4))
    for _ in range(1000):
        harness.step()
        for ask in harness.core.take_builds():
            num_builds += 1
            answer(harness, ask)
    assert num_builds == 100
    assert list(harness.reader.closed) == list(range(1, 101))
    harness.assert_idle()


def test_requests_without_a_guide_pass_those_that_wait_for_theirs() -> None:
    harness = harness_of()
    for number in range(1, 101):
        harness.submit(guided(number, f"grammar {number}"))
    harness.submit(submission(200, [1, 2, 3]))
    harness.run()
    assert list(harness.reader.closed) == [200]
    assert 0 < len(harness.core.take_builds()) <= MOST_OPEN
    assert harness.core.take_builds() == []


class Worker:
    """Keeps the programs that it built or started a row with last, as a worker's library does."""

    def __init__(self) -> None:
        self._built: OrderedDict[str, None] = OrderedDict()

    def use(self, text: str) -> bool:
        """Whether the program was there."""
        there = text in self._built
        self._built[text] = None
        self._built.move_to_end(text)
        while len(self._built) > MOST_PROGRAMS:
            self._built.popitem(last=False)
        return there


def crowded_harness(policy: str) -> Harness:
    """Request 1 has most blocks for fifty steps, and 2, whose guide is "large", waits for them."""
    config = SchedulerConfig(
        max_plans_in_flight=1, max_num_seqs=16, max_num_batched_tokens=256, scheduling_policy=policy
    )
    settings = ready(num_blocks=24, block_size=4, max_model_len=96)
    core = SchedulerCore(config, settings, enable_prefix_caching=False, hash_key=b"k" * 32, builds_guides=True)
    harness = Harness(core)
    harness.submit(submission(1, list(range(1, 41)), priority=-2, max_tokens=50))
    harness.step()
    large = guided(2, "large").sequences[0].sampling
    harness.submit(submission(2, list(range(1, 61)), sampling=large, max_tokens=4))
    return harness


def test_a_guide_that_waits_long_for_blocks_is_not_built_within_a_step() -> None:
    harness, worker = crowded_harness("fcfs"), Worker()
    for number in range(3, 83):
        harness.submit(guided(number, f"grammar {number}"))
    asks: list[BuildGuide] = []
    for _ in range(200):
        known = len(harness.plans)
        harness.step()
        for plan in harness.plans[known:]:
            guides = [row.sampling.guide for row in plan.new_rows if row.sampling.guide is not None]
            assert all(worker.use(guide.text) for guide in guides)
        asks += harness.core.take_builds()
        for ask in asks[:2]:
            worker.use(ask.program.text)
            answer(harness, ask)
        del asks[:2]
    assert len(harness.reader.closed) == 82


def test_a_guide_that_many_others_have_overtaken_is_built_again() -> None:
    harness, worker = crowded_harness("priority"), Worker()
    builds: list[str] = []
    for step in range(200):
        known = len(harness.plans)
        harness.step()
        if step < 40:
            for number in range(3 + 2 * step, 5 + 2 * step):
                harness.submit(guided(number, f"grammar {number}", max_tokens=1, priority=-1))
        for plan in harness.plans[known:]:
            guides = [row.sampling.guide for row in plan.new_rows if row.sampling.guide is not None]
            assert all(worker.use(guide.text) for guide in guides)
        for ask in harness.core.take_builds():
            builds.append(ask.program.text)
            worker.use(ask.program.text)
            answer(harness, ask)
    assert 1 < builds.count("large") <= 1 + 80 // MOST_OPEN
    assert len(builds) == 80 + builds.count("large")
    harness.assert_idle()


def test_an_ended_request_is_forgotten_while_its_guide_is_built() -> None:
    harness = harness_of()
    gc.collect()
    before = sum(isinstance(found, Sequence) for found in gc.get_objects())
    for number in range(1, 51):
        harness.submit(guided(number, "same"))
        harness.step()
        harness.core.take_builds()
        harness.abort(number)
    gc.collect()
    assert sum(isinstance(found, Sequence) for found in gc.get_objects()) <= before
    harness.assert_idle()


def test_tenants_take_turns_in_the_queue_of_builds() -> None:
    queue, occupied = BuildQueue(), {}
    for number in range(100):
        queue.add("a", program(f"a{number}"))
    first = queue.take(occupied)
    assert {ask.tenant for ask in first} == {"a"}
    assert len(first) < MOST_OPEN
    for tenant in ("b", "c"):
        queue.add(tenant, program(tenant))
    assert [ask.program.text for ask in queue.take(occupied)] == ["b", "c"]
    for ask in first[:6]:
        del occupied[program_key(ask.program)]
    queue.add("b", program("b2"))
    assert [ask.program.text for ask in queue.take(occupied)][:2] == ["a12", "b2"]


def test_large_guides_of_many_tenants_leave_room_for_small_ones() -> None:
    queue, occupied = BuildQueue(), {}
    for number in range(2 * MOST_OPEN):
        queue.add(f"loud {number}", program(f"{number}" + (SMALL_BYTES + 1) * "a"))
    assert 1 < len(queue.take(occupied)) < MOST_OPEN
    queue.add("polite", program("small"))
    assert [ask.program.text for ask in queue.take(occupied)] == ["small"]


def test_the_guide_of_a_suspect_is_built_although_others_take_all_the_room() -> None:
    harness = harness_of()
    harness.submit(guided(1, "suspect"))
    harness.submit(submission(2, [1, 2, 3]))
    harness.step()
    answer(harness, harness.core.take_builds()[0])
    for number in range(3, 60):
        harness.submit(guided(number, f"grammar {number}"))
    harness.plan()
    harness.lose(fault=True)
    for _ in range(200):
        for ask in harness.core.take_builds():
            answer(harness, ask)
        harness.step()
    assert set(harness.reader.closed) == set(range(1, 60))
    harness.assert_idle()
