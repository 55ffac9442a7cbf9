"""The scheduler's part of the picture that the page draws."""

import msgspec

from troupellm.actors.scheduler.live_view import run_lengths, view_of
from troupellm.protocol.messages.live_view import (
    FREE,
    MOST_CELLS,
    MOST_KEYS,
    MOST_REQUESTS,
    MOST_STEPS,
    OWNERS,
    KeyView,
    LiveView,
    MailboxView,
    RequestView,
    SchedulerView,
    StepView,
)
from troupellm.tests.support.scheduler.guided_requests import guided, harness_of
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, submission

PROMPT = [1, 2, 3, 4, 5]
MOST_BYTES = 16_384


def reasons(harness: Harness) -> dict[int, str]:
    """Why each request waits."""
    view = view_of(harness.core, 0.0)
    return {row.number: view.reasons[row.why] for row in view.requests}


def test_a_request_that_runs_has_no_reason_and_the_next_one_waits_for_a_row() -> None:
    harness = Harness(make_core(max_num_seqs=1))
    harness.submit(submission(1, PROMPT))
    harness.submit(submission(2, PROMPT))
    harness.step()
    assert reasons(harness) == {1: "", 2: "the batch is full"}


def test_requests_wait_for_blocks() -> None:
    settings = ready(num_blocks=4, block_size=4, max_model_len=16)
    harness = Harness(make_core(settings), settings)
    for number, length in ((1, 8), (2, 12), (3, 4)):
        harness.submit(submission(number, [number] * length, max_tokens=4))
    harness.step()
    assert reasons(harness) == {1: "", 2: "no KV blocks are free", 3: "the request before it needs KV blocks"}


def test_a_request_waits_for_its_grammar() -> None:
    harness = harness_of()
    harness.submit(guided(1))
    harness.step()
    assert reasons(harness) == {1: "its grammar is compiled"}


def test_a_long_table_has_running_and_waiting_requests() -> None:
    settings = ready(num_blocks=1_024, block_size=4, max_model_len=16)
    harness = Harness(make_core(settings, max_num_seqs=120, max_num_batched_tokens=2_048), settings)
    for number in range(1, 241):
        harness.submit(submission(number, PROMPT))
    harness.step()
    view = view_of(harness.core, 0.0)
    assert (len(view.requests), view.hidden) == (MOST_REQUESTS, 240 - MOST_REQUESTS)
    half = MOST_REQUESTS // 2
    assert [row.number for row in view.requests] == [*range(1, half + 1), *range(121, 121 + half)]
    assert {view.reasons[row.why] for row in view.requests[half:]} == {"the batch is full"}


def test_blocks_have_the_colours_of_their_requests() -> None:
    settings = ready(num_blocks=8, block_size=4, max_model_len=16)
    harness = Harness(make_core(settings), settings)
    for number, length in ((1, 7), (2, 3)):
        harness.submit(submission(number, [number] * length, max_tokens=4))
    harness.step()
    view = view_of(harness.core, 0.0)
    cells = [value for value, count in zip(view.cells[::2], view.cells[1::2], strict=True) for _ in range(count)]
    assert view.blocks_per_cell == 1
    assert sorted(cells) == [FREE] * 5 + [OWNERS + 1] * 2 + [OWNERS + 2]


def test_equal_cells_are_counted() -> None:
    assert run_lengths([0, 0, 0, 5, 1, 1]) == (0, 3, 5, 1, 1, 2)
    assert run_lengths([]) == ()


def test_the_fullest_view_stays_below_its_limit() -> None:
    reason, name = "its first sequence computes the prompt", "k" * 64
    rows = [
        RequestView(999_999, "preempted", 9, 31, 32_768, 32_768, 9_999, 2_048, 3_600_000, 99_999)
        for _ in range(MOST_REQUESTS)
    ]
    scheduler = SchedulerView(
        requests=tuple(rows),
        reasons=("", *[reason] * 12),
        hidden=9_999,
        keys=tuple([KeyView(name, 256, 1_024, 123_456_789.5)] * MOST_KEYS),
        cells=run_lengths([OWNERS + place % 8 for place in range(MOST_CELLS)]),
        blocks_per_cell=999,
    )
    numbers = dict.fromkeys(LiveView.__struct_fields__, 10**9)
    texts = {"state": "ready", "model": "m" * 96, "notice": reason}
    parts = {
        "recent": tuple([StepView(8_192, 1_024, 1_024, 1_234.56)] * MOST_STEPS),
        "actors": tuple([MailboxView("scheduler", 3, 1_024, 1_024, 10**9, 0)] * 16),
        "scheduler": scheduler,
    }
    assert len(msgspec.json.encode(LiveView(**{**numbers, **texts, **parts}))) <= MOST_BYTES
