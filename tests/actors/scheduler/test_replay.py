"""The worker is lost: everybody goes on with the same tokens, nothing is shown twice, and the memory is whole."""

import msgspec
import pytest

from troupellm.protocol.errors import RequestFailed
from troupellm.protocol.messages.graph_report import GraphReport
from troupellm.protocol.messages.scheduler import WorkerLost
from troupellm.protocol.messages.worker import SamplingState
from troupellm.tests.support.engines.inside import ledger_of
from troupellm.tests.support.scheduler.oracle import EOS, Harness, make_core, ready, stream_of, submission

PROMPT = [1, 2, 3, 4, 5]
NO_STOPS: frozenset[int] = frozenset()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("fault", [True, False])
def test_streams_go_on_with_the_same_tokens(caching: bool, plans: int, fault: bool) -> None:
    for steps in range(12):
        harness = Harness(make_core(caching=caching, max_plans_in_flight=plans, max_num_batched_tokens=8))
        harness.submit(submission(1, PROMPT, rows=3))
        harness.submit(submission(2, [7, *PROMPT] * 2, eos_token_ids=frozenset({EOS})))
        harness.submit(submission(3, [8]))
        for _ in range(steps):
            harness.step()
        harness.plan()
        harness.lose(fault=fault)
        harness.run()
        for row, prompt in ((100, PROMPT), (101, PROMPT), (102, PROMPT), (300, [8])):
            assert harness.reader.streams[row] == stream_of(prompt, row % 100, 8, NO_STOPS)
        assert harness.reader.streams[200] == stream_of([7, *PROMPT] * 2, 0, 8, frozenset({EOS}))
        assert set(harness.reader.closed) == {1, 2, 3}
        assert harness.core.snapshot().worker_losses == 1
        harness.assert_idle()


def test_losses_at_every_step() -> None:
    harness = Harness(make_core(max_plans_in_flight=2))
    for request in range(1, 6):
        harness.submit(submission(request, [request, *PROMPT]))
    while True:
        harness.plan()
        if not harness.oracle.pending:
            break
        harness.lose(fault=False)
        harness.plan()
        harness.finish()
    for request in range(1, 6):
        assert harness.reader.streams[100 * request] == stream_of([request, *PROMPT], 0, 8, NO_STOPS)
    harness.assert_idle()


def test_results_of_the_lost_worker_are_dropped() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.plan()
    late = harness.oracle.collect()
    harness.lose(fault=False)
    assert harness.core.update(late, 9.0).rows == ()
    assert harness.core.snapshot().dropped_results == 1
    harness.run()
    assert harness.reader.streams[100] == stream_of(PROMPT, 0, 8, NO_STOPS)


def test_the_blocks_of_what_ended_meanwhile_come_back_with_the_loss() -> None:
    harness = Harness(make_core(max_plans_in_flight=2))
    harness.submit(submission(1, PROMPT))
    harness.submit(submission(2, [9]))
    harness.plan()
    harness.abort(1)
    assert 1 in harness.reader.closed
    assert harness.core.snapshot().blocks_used > 0  # a plan in flight may still write them
    harness.lose()
    assert harness.core.snapshot().blocks_used == 0
    harness.run()
    harness.assert_idle()


def test_the_report_of_cuda_graphs_is_known_until_the_worker_is_lost() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    told = GraphReport(captured=1, missing=2, seconds=0.5, bytes=10)
    for graphs in (told, None):
        harness.plan()
        harness.core.update(msgspec.structs.replace(harness.oracle.collect(), graphs=graphs), 1.0)
        assert harness.core.snapshot().graphs == told
    harness.lose()
    assert harness.core.snapshot().graphs is None


def test_requests_that_come_while_there_is_no_worker_wait() -> None:
    harness = Harness(make_core())
    harness.core.lose_worker(WorkerLost("it died"))
    harness.submit(submission(1, PROMPT))
    assert harness.plan() is None
    assert harness.core.snapshot().waiting == 1
    harness.core.worker_restarted(ready())
    harness.run()
    assert harness.reader.streams[100] == stream_of(PROMPT, 0, 8, NO_STOPS)


def test_paused_readers_stay_paused() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.submit(submission(2, [9]))
    harness.step()
    harness.core.pause(1)
    harness.lose()
    harness.run()
    assert set(harness.reader.closed) == {2}
    assert harness.core.snapshot().paused == 1
    harness.core.resume(1)
    harness.run()
    assert harness.reader.streams[100] == stream_of(PROMPT, 0, 8, NO_STOPS)
    harness.assert_idle()


def test_prompt_logprobs_come_once() -> None:
    settings = ready()
    harness = Harness(make_core(settings, max_num_batched_tokens=2), settings)
    harness.submit(submission(1, PROMPT, sampling=SamplingState(prompt_logprobs=0)))
    harness.step()
    sequence = ledger_of(harness.core).sequences[100]
    sequence.num_prompt_logprobs = 3  # as if the first chunk's had been shown
    harness.lose()
    assert sequence.num_prompt_logprobs == 3
    assert not sequence.reads_prefix_cache
    harness.run()
    assert harness.reader.streams[100] == stream_of(PROMPT, 0, 8, NO_STOPS)


def test_a_smaller_worker_fails_what_it_cannot_hold() -> None:
    harness = Harness(make_core(ready(num_blocks=16)), ready(num_blocks=16))
    harness.submit(submission(1, PROMPT, max_tokens=30))
    harness.submit(submission(2, [9], max_tokens=4))
    harness.step()
    harness.settings = ready(num_blocks=4)
    harness.oracle.num_blocks = 4
    harness.lose(fault=False)
    harness.run()
    assert isinstance(harness.reader.closed[1].error, RequestFailed)
    assert harness.reader.streams[200] == stream_of([9], 0, 4, NO_STOPS)
    assert harness.core.snapshot().blocks_total == 4
    harness.assert_idle()


def test_another_model_is_refused() -> None:
    core = make_core()
    core.lose_worker(WorkerLost("it died"))
    with pytest.raises(ValueError, match="another model"):
        core.worker_restarted(msgspec.structs.replace(ready(), vocab_width=51))


def test_steps_are_smaller_after_want_of_memory_and_grow_again() -> None:
    harness = Harness(make_core(max_num_batched_tokens=32))
    harness.submit(submission(1, list(range(1, 41)), max_tokens=20))
    harness.plan()
    assert sum(harness.plans[-1].counts) == 32
    harness.lose(exhausted=True)
    harness.plan()
    assert sum(harness.plans[-1].counts) == 16
    harness.run()
    for request in range(2, 8):
        harness.submit(submission(request, [request], max_tokens=20))
        harness.run()
    harness.submit(submission(9, list(range(41, 1, -1))))
    harness.plan()
    assert sum(harness.plans[-1].counts) > 16
    harness.run()
    harness.assert_idle()
