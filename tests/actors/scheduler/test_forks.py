"""Forks: a prompt is computed once for all of them, with and without cached blocks, and its blocks are shared."""

import itertools

import pytest

from troupellm.tests.support.scheduler.oracle import (
    EOS,
    Harness,
    beam_submission,
    make_core,
    ready,
    stream_of,
    submission,
)
from troupellm.tests.support.scheduler.plain_beams import beams_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
NEVER = frozenset[int]()


def streams(harness: Harness, request: int, rows: int) -> list[list[int]]:
    return [harness.reader.streams[100 * request + fork] for fork in range(rows)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [511, 512, 513])
def test_eight_forks_hold_the_prompt_once(length: int, caching: bool) -> None:
    made = ready(num_blocks=300, block_size=16, max_model_len=600)
    core = make_core(made, caching=caching, max_num_batched_tokens=1024)
    harness = Harness(core, made)
    prompt = [token % 40 + 2 for token in range(length)]
    harness.submit(submission(1, prompt, 8, max_tokens=10))
    most = 0
    while harness.step():
        most = max(most, core.snapshot().blocks_used)
    assert streams(harness, 1, 8) == [stream_of(prompt, fork, 10, NEVER) for fork in range(8)]
    assert most <= 32 + 8 * 2  # eight requests would hold 33 each
    assert harness.oracle.num_computed == length + 7 + 8 * 9  # each fork needs logits for its own first token
    copied = [copy for plan in harness.plans for copy in plan.copies]
    assert len(copied) == (0 if length == 513 else 7)


@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_stays_when_the_first_fork_ends_at_once(caching: bool) -> None:
    made = ready()
    harness = Harness(make_core(made, caching=caching), made)
    harness.submit(submission(1, PROMPT, 6, max_tokens=1))
    harness.run()
    assert streams(harness, 1, 6) == [stream_of(PROMPT, fork, 1, NEVER) for fork in range(6)]
    assert harness.oracle.num_computed == len(PROMPT) + 5
    harness.assert_idle()


def test_an_abort_leaves_nothing_of_the_forks() -> None:
    made = ready(num_blocks=40)
    for steps in range(5):
        harness = Harness(make_core(made, caching=False, max_num_seqs=3), made)
        harness.submit(submission(1, PROMPT, 8))
        for _ in range(steps):
            harness.step()
        harness.abort(1)
        harness.run()
        harness.assert_idle()
        assert harness.core.snapshot().blocks_free == 40


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("plans", [1, 2])
def test_forks_and_beams_in_pools_of_every_size(plans: int, caching: bool) -> None:
    """Preempted forks come back beside each other; none reads what another one's copy has yet to bring."""
    for num_blocks, block_size, groups in itertools.product(range(3, 9), (2, 4, 8), (1, 2)):
        made = ready(num_blocks, block_size, max_model_len=num_blocks * block_size, groups=groups)
        core = make_core(made, caching=caching, max_plans_in_flight=plans, max_num_seqs=4)
        harness = Harness(core, made)
        length = min(len(PROMPT), num_blocks * block_size - 4)
        for request, rows in ((1, 1), (2, 3), (3, 2)):
            harness.submit(submission(request, PROMPT[: length - request % 2], rows, max_tokens=4))
        harness.submit(beam_submission(4, PROMPT[: length - 2], 2, max_tokens=3, eos_token_ids=frozenset({EOS})))
        harness.run()
        for request, rows in ((1, 1), (2, 3), (3, 2)):
            prompt = PROMPT[: length - request % 2]
            assert streams(harness, request, rows) == [stream_of(prompt, fork, 4, NEVER) for fork in range(rows)]
        if harness.reader.closed[4].error is None:  # else two beams need more than there is
            assert streams(harness, 4, 2) == beams_of(PROMPT[: length - 2], 2, 3, frozenset({EOS}))
        harness.assert_idle()


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("max_tokens", range(8, 16))
def test_a_fork_never_copies_what_is_being_copied_in_the_same_step(max_tokens: int, plans: int) -> None:
    """A preempted fork comes back by a copy from the prefix cache, beside one that starts: no chain of copies."""
    made = ready(num_blocks=4, block_size=8, max_model_len=32)
    harness = Harness(make_core(made, max_plans_in_flight=plans), made)
    harness.submit(submission(1, PROMPT, 3, max_tokens=max_tokens))
    harness.run()
    assert harness.core.snapshot().preemptions
    assert streams(harness, 1, 3) == [stream_of(PROMPT, fork, max_tokens, NEVER) for fork in range(3)]
