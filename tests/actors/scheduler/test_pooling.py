"""Pooling requests beside generating ones: they end with their prompt, exactly once, in every case."""

import random

import msgspec
import pytest

from troupellm.actors.scheduler.plans import BrokenResult
from troupellm.protocol.errors import ContextLengthExceeded, RequestFailed
from troupellm.protocol.messages.scheduler import SubmitRequest
from troupellm.protocol.messages.worker import RowPooled, WorkerReady
from troupellm.protocol.params.pooling import PoolingAbility, PoolingState, PoolingType
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, stream_of, submission
from troupellm.tests.support.scheduler.plain_beams import vector_of

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def settings(*, whole: bool = False, **fields: int) -> WorkerReady:
    ability = PoolingAbility(tasks=("embed",), pooling_type="LAST", hidden_size=1)
    return msgspec.structs.replace(ready(**fields), pooling=ability, whole_prompts=whole, generates=not whole)


def pooled(request: int, prompt: list[int], kind: PoolingType = "LAST", **fields: object) -> SubmitRequest:
    state = PoolingState(task="embed", pooling_type=kind)
    return submission(request, prompt, max_tokens=1, pooling=state, streaming=False, **fields)


def harness_of(*, whole: bool = False, blocks: dict[str, int] | None = None, **config: object) -> Harness:
    kept = settings(whole=whole, **(blocks or {}))
    return Harness(make_core(kept, caching=not whole, **config), kept)


def vectors(harness: Harness) -> dict[int, bytes]:
    """By request; each came once."""
    found = [(entry.row // 100, entry.vector) for output in harness.outputs for entry in output.pooled]
    assert len({request for request, _ in found}) == len(found), "a vector was shown twice"
    return dict(found)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("plans", [1, 2])
def test_a_pooling_request_ends_with_its_prompt_and_samples_nothing(whole: bool, plans: int) -> None:
    harness = harness_of(whole=whole, max_plans_in_flight=plans)
    harness.submit(pooled(1, PROMPT))
    harness.run()
    assert vectors(harness) == {1: vector_of(PROMPT)}
    closed = harness.reader.closed[1]
    assert (closed.usage.prompt_tokens, closed.usage.completion_tokens, closed.error) == (9, 0, None)
    assert (closed.scheduled is not None, closed.first_token) == (True, None)
    assert harness.reader.streams.get(100, []) == []
    assert sum(sum(plan.counts) for plan in harness.plans) == 9
    assert harness.core.snapshot().blocks_used == 0


def test_a_prompt_may_fill_the_context() -> None:
    prompt = [number % 50 for number in range(64)]
    harness = harness_of(max_num_batched_tokens=7)
    harness.submit(pooled(1, prompt))
    harness.submit(pooled(2, [*prompt, 1]))
    harness.run()
    assert vectors(harness) == {1: vector_of(prompt)}
    assert isinstance(harness.reader.closed[2].error, ContextLengthExceeded)


def test_chunks_mix_with_decodes() -> None:
    harness = harness_of(max_num_batched_tokens=6, max_plans_in_flight=2)
    for request in (1, 3):
        harness.submit(submission(request, [request, 2, 3], max_tokens=12))
    for request in (2, 4, 5):
        harness.submit(pooled(request, [request, *PROMPT, *PROMPT]))
    harness.run()
    assert vectors(harness) == {request: vector_of([request, *PROMPT, *PROMPT]) for request in (2, 4, 5)}
    for request in (1, 3):
        assert harness.reader.streams[100 * request] == stream_of([request, 2, 3], 0, 12, frozenset())
    assert max(sum(plan.counts) for plan in harness.plans) <= 6


def test_whole_prompts_are_never_cut_however_small_steps_become() -> None:
    harness = harness_of(whole=True, blocks={"block_size": 64, "num_blocks": 9}, max_num_batched_tokens=64)
    prompts = {request: [request] * length for request, length in ((1, 60), (2, 5), (3, 1), (4, 33), (5, 64))}
    for request, prompt in prompts.items():
        harness.submit(pooled(request, prompt))
    for _ in range(4):
        harness.plan()
        harness.lose(fault=False, exhausted=True)  # from here on steps compute half as much
    harness.run()
    assert vectors(harness) == {request: vector_of(prompt) for request, prompt in prompts.items()}
    for plan in harness.plans:
        assert set(plan.starts) == {0}
        assert list(plan.counts) == [len(prompts[row // 100]) for row in plan.rows]
        assert sum(plan.counts) <= 64


def test_the_last_token_alone_may_build_on_the_prefix_cache() -> None:
    harness = harness_of()
    harness.submit(submission(1, PROMPT, max_tokens=2))
    harness.run()
    for request, kind in ((2, "LAST"), (3, "MEAN"), (4, "CLS")):
        harness.submit(pooled(request, PROMPT, kind))
        harness.run()
        assert harness.reader.closed[request].usage.cached_tokens == (8 if kind == "LAST" else 0)
    harness.submit(submission(5, [*PROMPT, 3], max_tokens=2))
    harness.run()
    assert harness.reader.closed[5].usage.cached_tokens > 0  # what was computed to be pooled serves generation


def test_aborted_preempted_and_computed_again() -> None:
    harness = harness_of(blocks={"num_blocks": 10}, max_num_batched_tokens=8, max_plans_in_flight=2)
    for request in range(1, 5):
        harness.submit(submission(request, [request, 2, 3], max_tokens=20))
        harness.submit(pooled(10 + request, [request, *PROMPT]))
    harness.plan()
    harness.abort(14)
    harness.run()
    assert vectors(harness) == {10 + request: vector_of([request, *PROMPT]) for request in range(1, 4)}
    assert harness.core.snapshot().preemptions > 0


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("when", range(4))
def test_a_lost_worker_costs_no_vector(whole: bool, when: int) -> None:
    harness = harness_of(whole=whole, max_num_batched_tokens=16, max_plans_in_flight=2)
    for request in range(1, 7):
        harness.submit(pooled(request, [request, *PROMPT]))
    for _ in range(when):
        harness.step()
    harness.plan()
    harness.lose()
    harness.run()
    assert vectors(harness) == {request: vector_of([request, *PROMPT]) for request in range(1, 7)}


def test_a_row_that_fails_has_no_vector() -> None:
    harness = harness_of()
    harness.submit(pooled(1, PROMPT))
    harness.submit(pooled(2, PROMPT))
    harness.oracle.broken_rows.add(100)
    harness.run()
    assert vectors(harness) == {2: vector_of(PROMPT)}
    assert isinstance(harness.reader.closed[1].error, RequestFailed)


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        (RowPooled(100, b"\0\0\0\0"), RowPooled(100, b"\0\0\0\0")),
        (RowPooled(100, b"\0\0\0\0"), RowPooled(200, b"\0\0\0\0")),
        (RowPooled(100, b"\0\0\0"),),
        (RowPooled(100, b"\0" * 8),),
        (RowPooled(300, b"\0\0\0\0"),),
    ],
)
def test_vectors_that_nobody_asked_for_are_a_worker_fault(wrong: tuple[RowPooled, ...]) -> None:
    harness = harness_of()
    harness.submit(pooled(1, PROMPT))
    harness.submit(submission(2, PROMPT, max_tokens=3))
    harness.plan()
    with pytest.raises(BrokenResult):
        harness.core.update(msgspec.structs.replace(harness.oracle.collect(), pooled=wrong), 9.0)
    harness.lose()
    harness.run()
    assert vectors(harness) == {1: vector_of(PROMPT)}


def test_priorities_and_turns_of_tenants() -> None:
    harness = harness_of(scheduling_policy="priority", max_num_seqs=1)
    for request, priority in ((1, 5), (2, 0), (3, -5)):
        harness.submit(pooled(request, [request, *PROMPT], priority=priority))
    harness.run()
    assert list(vectors(harness)) == [3, 2, 1]
    harness = harness_of(max_num_seqs=1)
    for request in range(1, 7):
        harness.submit(pooled(request, [request, *PROMPT], tenant="flood"))
    harness.submit(pooled(7, [7, *PROMPT], tenant="polite"))
    harness.run()
    assert list(vectors(harness)).index(7) <= 2


@pytest.mark.parametrize("whole", [False, True])
def test_random_histories_end_with_every_vector(whole: bool) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        harness = harness_of(
            whole=whole,
            blocks={"num_blocks": 24},
            max_num_batched_tokens=64 if whole else draw.choice((3, 8, 20)),
            max_num_seqs=draw.choice((2, 5)),
            max_plans_in_flight=draw.choice((1, 2)),
        )
        prompts: dict[int, list[int]] = {}
        texts: dict[int, list[int]] = {}
        aborted: set[int] = set()
        for request in range(1, 30):
            prompt = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 30))]  # many begin alike
            if whole or draw.random() < 0.6:
                prompts[request] = prompt
                harness.submit(pooled(request, prompt, draw.choice(("LAST", "MEAN", "CLS"))))
            else:
                texts[request] = prompt
                harness.submit(submission(request, prompt, max_tokens=6))
            for _ in range(draw.randrange(4)):
                action = draw.random()
                if action < 0.5:
                    harness.plan()
                elif action < 0.8 and harness.oracle.pending:
                    harness.finish()
                elif action < 0.9:
                    gone = draw.randrange(1, request + 1)
                    aborted.add(gone)
                    harness.abort(gone)
                elif action < 0.95:
                    harness.lose(fault=False)
        harness.run()
        found = vectors(harness)
        assert found.keys() >= prompts.keys() - aborted
        for request, vector in found.items():
            assert vector == vector_of(prompts[request]), (seed, request)
        for request in texts.keys() - aborted:
            assert harness.reader.streams[100 * request] == stream_of(texts[request], 0, 6, frozenset())
        assert harness.core.snapshot().blocks_used == 0
