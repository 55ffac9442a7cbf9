"""The inputs of a block's key, and the effect of prefix reuse on plans."""

from array import array

from troupellm.actors.kv_cache.block_hash import PrefixHasher, namespace, split_keys
from troupellm.protocol.messages.worker import BlockCopy, SamplingState
from troupellm.tests.support.engines.inside import block_tables_of
from troupellm.tests.support.scheduler.oracle import EOS, Harness, make_core, ready, stream_of, submission

PROMPT = list(range(1, 14))  # three full blocks of four, and one token


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def keys(tokens: list[int], *, secret: bytes = b"s", **named: object) -> list[bytes]:
    """Without the root."""
    hasher = PrefixHasher(secret, 4)
    made = [hasher.root(namespace(**named))]
    hasher.extend(made, packed(tokens[: len(tokens) // 4 * 4]))
    return made[1:]


def test_a_key_covers_every_token_before_it() -> None:
    changed = [99, *PROMPT[1:]]
    assert len(set(keys(PROMPT)) | set(keys(changed))) == 6
    assert keys(PROMPT)[0] == keys(PROMPT[:4])[0]
    assert keys([*PROMPT[:4], 50, 50, 50, 50])[0] == keys(PROMPT)[0]


def test_keys_are_extended_without_a_change_of_the_earlier_ones() -> None:
    hasher = PrefixHasher(b"s", 4)
    named = [hasher.root(namespace())]
    for begin, end in ((0, 4), (4, 4), (4, 12)):
        hasher.extend(named, packed(PROMPT[begin:end]))
        assert len(named) == end // 4 + 1
    assert named[1:] == keys(PROMPT)


def test_the_keys_of_a_prompt_are_those_of_its_tokens() -> None:
    hasher, owner = PrefixHasher(b"s", 4), namespace(tenant="one")
    for length in (0, 3, 4, 12, 13):
        prompt = PROMPT[:length]
        made = split_keys(hasher.prompt_keys(owner, packed(prompt)))
        assert made == [hasher.root(owner), *keys(prompt, tenant="one")]


def starts_of(harness: Harness, request: int) -> int:
    """Where the first span of a request begins, after it has run."""
    harness.run()
    return next(plan.starts[plan.rows.index(100 * request)] for plan in harness.plans if 100 * request in plan.rows)


def test_an_equal_prompt_starts_behind_the_shared_blocks() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    assert starts_of(harness, 1) == 0
    harness.submit(submission(2, PROMPT))
    assert starts_of(harness, 2) == 12
    assert harness.reader.closed[2].usage.cached_tokens == 12
    assert harness.reader.streams[200] == harness.reader.streams[100] == stream_of(PROMPT, 0, 8, frozenset())


def test_the_last_prompt_token_is_always_computed() -> None:
    harness = Harness(make_core())
    for request in (1, 2):
        harness.submit(submission(request, PROMPT[:12]))
        harness.run()
    assert starts_of(harness, 2) == 11


def test_answers_are_found_too() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.run()
    second = PROMPT + harness.reader.streams[100] + [7]
    harness.submit(submission(2, second, max_tokens=1))
    assert starts_of(harness, 2) == 20


def test_a_prompt_that_differs_inside_a_block_starts_at_the_difference() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.run()
    harness.submit(submission(2, [*PROMPT[:6], 40, 41, 42], max_tokens=3))
    assert starts_of(harness, 2) == 6
    assert [(copy.group, copy.source != copy.target) for copy in harness.plans[-3].copies] == [(0, True)]
    assert harness.reader.closed[2].usage.cached_tokens == 6
    assert harness.reader.streams[200] == stream_of([*PROMPT[:6], 40, 41, 42], 0, 3, frozenset())


def test_of_a_whole_hit_only_the_last_token_is_computed() -> None:
    """Wherever in a block the prompt ends, and whether its block was full or not."""
    for length in range(2, 18):
        harness = Harness(make_core())
        prompt = list(range(1, length + 1))
        for request in (1, 2):
            harness.submit(submission(request, prompt, max_tokens=1))
            harness.run()
        assert starts_of(harness, 2) == length - 1, length


def test_the_beginning_of_a_block_that_is_still_written_is_found() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT[:6], max_tokens=20))
    for _ in range(2):
        harness.step()
    harness.submit(submission(2, PROMPT[:9], max_tokens=2))
    assert starts_of(harness, 2) == 6
    assert harness.reader.streams[100] == stream_of(PROMPT[:6], 0, 20, frozenset())


def test_a_preempted_sequence_finds_what_it_had_computed() -> None:
    settings = ready(num_blocks=6)
    harness = Harness(make_core(settings, max_num_batched_tokens=16), settings)
    harness.submit(submission(1, PROMPT[:6], max_tokens=9))
    harness.submit(submission(2, [9, *PROMPT[:5]], max_tokens=9))
    harness.run()
    assert harness.core.snapshot().preemptions > 0
    for request, prompt in ((1, PROMPT[:6]), (2, [9, *PROMPT[:5]])):
        assert harness.reader.streams[100 * request] == stream_of(prompt, 0, 9, frozenset())


def test_a_reset_lets_nobody_find_what_was_computed_before() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, max_tokens=2))
    harness.run()
    harness.submit(submission(2, PROMPT, max_tokens=20))
    harness.step()
    harness.core.reset_prefix_cache()
    harness.core.assert_invariants()
    assert harness.core.snapshot().blocks_cached == 0
    harness.submit(submission(3, PROMPT, max_tokens=2))
    assert starts_of(harness, 3) == 0
    assert harness.reader.streams[200] == stream_of(PROMPT, 0, 20, frozenset())
    # The sequence that ran through the reset stands on blocks from before it, so its later ones cannot be found
    # either.
    harness.submit(submission(4, PROMPT + harness.reader.streams[200][:12] + [7], max_tokens=1))
    assert starts_of(harness, 4) == 13 + 1  # those of request 3: its prompt and one token


def test_tenants_with_a_salt_of_their_own_share_nothing() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, cache_salt=b"one"))
    harness.run()
    harness.submit(submission(2, PROMPT, cache_salt=b"two"))
    assert starts_of(harness, 2) == 0
    harness.submit(submission(3, PROMPT, cache_salt=b"one"))
    assert starts_of(harness, 3) == 12


def test_prompt_logprobs_are_computed_not_looked_up() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT))
    harness.run()
    harness.submit(submission(2, PROMPT, sampling=SamplingState(prompt_logprobs=0)))
    assert starts_of(harness, 2) == 0
    harness.submit(submission(3, PROMPT))
    assert starts_of(harness, 3) == 12


def test_without_the_cache_nothing_is_found() -> None:
    harness = Harness(make_core(caching=False))
    for request in (1, 2):
        harness.submit(submission(request, PROMPT))
        assert starts_of(harness, request) == 0
    assert harness.core.snapshot().blocks_cached == 0


def test_blocks_of_an_aborted_request_stay_findable() -> None:
    harness = Harness(make_core(max_num_batched_tokens=8))
    harness.submit(submission(1, PROMPT))
    harness.step()
    harness.abort(1)
    harness.assert_idle()
    harness.submit(submission(2, PROMPT))
    assert starts_of(harness, 2) == 8


def test_blocks_of_a_failed_row_are_not_trusted() -> None:
    harness = Harness(make_core())
    harness.oracle.broken_rows.add(100)
    harness.submit(submission(1, PROMPT))
    harness.run()
    harness.submit(submission(2, PROMPT))
    assert starts_of(harness, 2) == 0


def test_blocks_of_a_row_that_failed_late_are_forgotten() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, max_tokens=20))
    for _ in range(4):
        harness.step()
    harness.oracle.broken_rows.add(100)
    harness.run()
    assert harness.core.snapshot().blocks_cached == 0
    harness.submit(submission(2, PROMPT))
    assert starts_of(harness, 2) == 0


def test_siblings_wait_for_the_first_to_compute_the_prompt() -> None:
    harness = Harness(make_core())
    harness.submit(submission(1, PROMPT, rows=3, eos_token_ids=frozenset({EOS})))
    harness.step()
    assert harness.plans[0].rows == (100,)
    assert harness.core.snapshot().waiting == 2
    harness.step()
    assert harness.plans[1].rows == (100, 101, 102)
    assert harness.plans[1].starts == (13, 12, 12)
    harness.run()
    usage = harness.reader.closed[1].usage
    assert usage.prompt_tokens == 13
    assert usage.cached_tokens == 0
    assert usage.completion_tokens == sum(len(harness.reader.streams[100 + fork]) for fork in range(3))


def test_all_groups_of_a_model_share_the_same_prefix() -> None:
    settings = ready(groups=2)
    harness = Harness(make_core(settings), settings)
    for request in (1, 2):
        harness.submit(submission(request, PROMPT))
        harness.run()
    assert starts_of(harness, 2) == 12
    assert harness.core.snapshot().blocks_total == 128


def test_a_copy_of_a_copy_names_the_first_source() -> None:
    """The worker reads all sources of a plan before it writes a target."""
    tables = block_tables_of(make_core())
    for group, source, target in ((0, 4, 1), (0, 1, 2), (1, 7, 6), (0, 5, 1), (0, 1, 3)):
        tables._copies[target] = BlockCopy(group, tables._origin(source), target)
    assert set(tables.take_copies()) == {
        BlockCopy(0, 5, 1),
        BlockCopy(0, 4, 2),
        BlockCopy(1, 7, 6),
        BlockCopy(0, 5, 3),
    }
    assert not tables.take_copies()


def test_a_tenant_that_is_named_like_a_salt_shares_nothing_with_it() -> None:
    assert not set(keys(PROMPT, tenant="a")) & set(keys(PROMPT, cache_salt=b"a"))
    assert keys(PROMPT, tenant="a", cache_salt=b"s") == keys(PROMPT, tenant="b", cache_salt=b"s")
