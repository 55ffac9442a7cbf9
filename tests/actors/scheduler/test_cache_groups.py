"""Several cache groups in one pool of blocks: windows that let blocks go, and prefixes by what a window sees."""

import pytest

from troupellm.protocol.errors import ContextLengthExceeded
from troupellm.protocol.messages.cache_groups import NO_LIMIT, count_blocks, longest_sequence, window_blocks
from troupellm.protocol.messages.worker import NULL_BLOCK, WorkerReady
from troupellm.tests.support.engines.inside import block_tables_of, cached_blocks_of
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, stream_of, submission

WINDOW = 10
NEVER: frozenset[int] = frozenset()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1 + (seed + 7 * place) % 49 for place in range(length)]


def harness_of(settings: WorkerReady, **config: object) -> Harness:
    return Harness(make_core(settings, **config), settings)


def windowed(num_blocks: int = 64, *windows: int | None) -> WorkerReady:
    return ready(num_blocks, 4, max_model_len=512, windows=windows or (None, WINDOW))


def used(harness: Harness) -> list[int]:
    return [group.used for group in harness.core.snapshot().cache_groups]


@pytest.mark.parametrize("plans", [1, 2])
def test_a_long_sequence_holds_a_window_of_blocks(plans: int) -> None:
    harness = harness_of(windowed(), max_plans_in_flight=plans)
    harness.submit(submission(1, prompt(5), max_tokens=150))
    most = [0, 0]
    while harness.step():
        most = [max(pair) for pair in zip(most, used(harness), strict=True)]
    assert harness.reader.streams[100] == stream_of(prompt(5), 0, 150, NEVER)
    assert most[0] == 39
    assert most[1] <= window_blocks(WINDOW, plans, 4) + 1


def test_a_long_prompt_takes_blocks_as_it_is_computed() -> None:
    harness = harness_of(windowed(), max_num_batched_tokens=8)
    harness.submit(submission(1, prompt(120), max_tokens=4))
    most = [0, 0]
    while harness.step():
        most = [max(pair) for pair in zip(most, used(harness), strict=True)]
    assert harness.reader.streams[100] == stream_of(prompt(120), 0, 4, NEVER)
    assert most[0] == 31
    assert most[1] <= window_blocks(WINDOW, 8, 4)


def test_the_groups_share_one_pool() -> None:
    """Blocks that windows give back serve the group that keeps everything: more fits than in halves."""
    settings = ready(20, 4, max_model_len=512, windows=(None, WINDOW))
    harness = harness_of(settings, max_num_batched_tokens=8)
    length = 4 * 33
    harness.submit(submission(1, prompt(length), max_tokens=2))
    harness.run()
    assert harness.reader.streams[100] == stream_of(prompt(length), 0, 2, NEVER)
    assert harness.core.snapshot().blocks_total == 40


def test_a_sequence_that_just_fits_runs_and_a_longer_one_is_refused() -> None:
    settings = ready(10, 4, max_model_len=512, windows=(None, WINDOW, 6))
    longest = longest_sequence((None, WINDOW, 6), 30, 4, 4)
    assert longest == 4 * (30 - window_blocks(WINDOW, 4, 4) - window_blocks(6, 4, 4))
    for caching in (True, False):
        harness = Harness(make_core(settings, caching=caching, max_num_batched_tokens=4), settings)
        harness.submit(submission(1, prompt(longest - 5), max_tokens=6))
        harness.submit(submission(2, prompt(longest - 5), max_tokens=7))
        harness.run()
        assert harness.reader.streams[100] == stream_of(prompt(longest - 5), 0, 6, NEVER)
        assert isinstance(harness.reader.closed[2].error, ContextLengthExceeded)


@pytest.mark.parametrize("windows", [(None, WINDOW), (WINDOW,), (6, None, WINDOW)])
def test_an_equal_prompt_starts_behind_the_shared_blocks(windows: tuple[int | None, ...]) -> None:
    harness = harness_of(windowed(64, *windows), max_num_batched_tokens=8)
    for request in (1, 2):
        harness.submit(submission(request, prompt(60), max_tokens=6))
        harness.run()
    assert harness.reader.closed[2].usage.cached_tokens == 59
    (row,) = [new for plan in harness.plans for new in plan.new_rows if new.row == 200]
    for window, table in zip(windows, row.blocks, strict=True):
        assert table.count(NULL_BLOCK) == (0 if window is None else (59 + 1 - window) // 4)


def test_a_prefix_is_found_though_what_lies_behind_its_window_is_gone() -> None:
    harness = harness_of(windowed(), max_num_batched_tokens=8)
    harness.submit(submission(1, prompt(60), max_tokens=1))
    harness.run()
    pool = block_tables_of(harness.core).pool
    sliding = [block for block in cached_blocks_of(pool) if pool.group_of(block) == 1]
    for block in sliding[: len(sliding) - 4]:  # least recently used first: those that were given back on the way
        del cached_blocks_of(pool)[block]
        pool.cached_by[1] -= 1
        pool.forget(block)
        pool._free.append(block)
    harness.submit(submission(2, prompt(60), max_tokens=6))
    harness.run()
    assert harness.reader.closed[2].usage.cached_tokens == 59
    assert harness.reader.streams[200] == stream_of(prompt(60), 0, 6, NEVER)
    harness.submit(submission(3, [*prompt(30), 3, 3], max_tokens=6))  # its window was among them
    harness.run()
    assert harness.reader.closed[3].usage.cached_tokens < 28
    assert harness.reader.streams[300] == stream_of([*prompt(30), 3, 3], 0, 6, NEVER)


def test_forks_share_what_the_window_still_holds() -> None:
    for caching in (True, False):
        settings = windowed()
        harness = Harness(make_core(settings, caching=caching, max_num_batched_tokens=16), settings)
        harness.submit(submission(1, prompt(61), rows=3, max_tokens=30))
        harness.run()
        for fork in range(3):
            assert harness.reader.streams[100 + fork] == stream_of(prompt(61), fork, 30, NEVER)
        assert harness.oracle.num_computed < 61 + 3 * 31


def test_a_preempted_and_a_replayed_sequence_say_the_same() -> None:
    settings = ready(9, 4, max_model_len=72, windows=(None, WINDOW))
    harness = harness_of(settings, max_num_batched_tokens=16, max_plans_in_flight=2)
    for request in (1, 2, 3):
        harness.submit(submission(request, prompt(9, request), max_tokens=20))
    for _ in range(12):
        harness.step()
    harness.lose(fault=False)
    harness.run()
    assert harness.core.snapshot().preemptions > 0
    for request in (1, 2, 3):
        assert harness.reader.streams[100 * request] == stream_of(prompt(9, request), 0, 20, NEVER)
    harness.assert_idle()


def test_blocks_are_counted_by_what_a_window_can_hold() -> None:
    assert count_blocks((None,), 33, 8, 16) == 3
    assert count_blocks((None, 100), 33, 8, 16) == 6
    assert count_blocks((None, 16), 1600, 1, 16) == 100 + 2
    assert longest_sequence((16,), 4, 8, 16) == NO_LIMIT
    assert longest_sequence((16, None), 4, 8, 16) == 32
    for window in range(1, 30):
        for span in range(1, 12):
            held = max(-(-(start + span) // 4) - max(0, start - window) // 4 for start in range(100))
            assert window_blocks(window, span, 4) == held
