"""Random walks over the block pool and the prefix cache, against models that are too simple to be wrong.

The walks over the whole scheduler core are in `tests/actors/scheduler/test_machine.py`.
"""

import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import Harness, make_core, ready, stream_of, submission

from troupellm.actors.kv_cache.block_pool import BlockPool

SIZE = 3
"""Tokens of a block in the pool's walk."""
BLOCKS = 500
"""In the prefix cache's walk; looking at all of them is most of its time."""


def packed(tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def common(first: Any, second: Any) -> int:
    """Length of the longest common beginning."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


class PoolMachine(RuleBasedStateMachine):
    """The model: who owns what, what each block is called, and in which order the unowned ones became unowned."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.tables: list[list[int]] = []
        self.full: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Block -> (prefix before it, its tokens), for blocks with a key."""
        self.begun: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """The same for blocks of which only the beginning is known."""
        self.unowned: list[int] = []
        """Named blocks without an owner, the first to be evicted first."""

    def owners(self) -> dict[int, int]:
        owned = [block for table in self.tables for block in table]
        return {block: owned.count(block) for block in owned}

    def unname(self, block: int) -> None:
        self.full.pop(block, None)
        self.begun.pop(block, None)

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        owned = self.owners()
        num_free = self.num_blocks - len(owned) - len(self.unowned)
        if count > num_free + len(self.unowned):
            with pytest.raises(ValueError, match="wanted"):
                self.pool.take(count)
            return
        evicted = self.unowned[: max(0, count - num_free)]
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(owned), "an owned block was given away"
        assert set(taken) & set(self.unowned) == set(evicted), "other blocks were evicted than the oldest ones"
        for block in evicted:
            self.unowned.remove(block)
            self.unname(block)
        self.tables.append(taken)

    @precondition(lambda self: self.full)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.full)))
        before, tokens = self.full[block]
        assert self.pool.find(self.key(before, tokens)) == block
        self.pool.share([block])
        if block in self.unowned:
            self.unowned.remove(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        left = self.owners()
        for block in reversed(table):
            if block not in left and (block in self.full or block in self.begun):
                self.unowned.append(block)

    @precondition(lambda self: any(self.tables))
    @rule(
        data=st.data(),
        before=st.sampled_from([(), (1,), (1, 2)]),
        tokens=st.tuples(*[st.integers(0, 1)] * SIZE),
        known=st.integers(1, SIZE),
    )
    def cache_block(self, data: st.DataObject, before: tuple[int, ...], tokens: tuple[int, ...], known: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners())))
        if known == SIZE:
            self.pool.cache_block(block, self.key(before, tokens), self.key((), before), packed(tokens))
            if block not in self.full:
                self.begun.pop(block, None)
                if (before, tokens) not in self.full.values():
                    self.full[block] = (before, tokens)
            return
        self.pool.cache_partial_block(block, self.key((), before), packed(tokens[:known]))
        if block not in self.full and self.longest(before, tokens[:known]) < known:
            self.begun[block] = (before, tokens[:known])

    @rule(before=st.sampled_from([(), (1,), (1, 2)]), tokens=st.lists(st.integers(0, 1), max_size=SIZE).map(tuple))
    def find_beginning(self, before: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        found = self.pool.find_beginning(self.key((), before), packed(tokens))
        length = self.longest(before, tokens)
        assert (found[1] if found else 0) == length
        if found is not None:
            names = {**self.begun, **self.full}
            assert names[found[0]][0] == before
            assert common(names[found[0]][1], tokens) == length

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners())))
        self.pool.forget(block)
        self.unname(block)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.full.clear()
        self.begun.clear()
        self.unowned.clear()

    def key(self, before: tuple[int, ...], tokens: tuple[int, ...]) -> bytes:
        return b"%d:" % len(before) + packed((*before, *tokens))

    def longest(self, before: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        names = [*self.begun.values(), *self.full.values()]
        return max((common(known, tokens) for parent, known in names if parent == before), default=0)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        owned = self.owners()
        self.pool.assert_invariants(owned)
        assert self.pool.num_cached == len(self.unowned)
        assert self.pool.num_free == self.num_blocks - len(owned) - len(self.unowned)
        for block, (before, tokens) in self.full.items():
            assert self.pool.find(self.key(before, tokens)) == block


class PrefixMachine(RuleBasedStateMachine):
    """The model: every sequence that was computed since the last reset, by namespace. Nothing is evicted here: there is
    a reset before the pool could be full.

    A request must find the longest beginning that it shares with any of them, but for its last token.
    """

    @initialize(block_size=st.sampled_from([1, 2, 4]), groups=st.sampled_from([1, 2]), plans=st.sampled_from([1, 2]))
    def start(self, block_size: int, groups: int, plans: int) -> None:
        made = ready(BLOCKS, block_size, max_model_len=64, groups=groups)
        self.block_size, self.groups = block_size, groups
        self.harness = Harness(make_core(made, max_plans_in_flight=plans), made, checks_every_call=False)
        self.computed: dict[bytes, list[list[int]]] = {}
        self.requests = self.most_blocks = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        salt=st.sampled_from([b"", b"", b"other"]),
        max_tokens=st.integers(1, 9),
    )
    def ask(self, prompt: list[int], salt: bytes, max_tokens: int) -> None:
        blocks = self.groups * (-(-(len(prompt) + max_tokens) // self.block_size) + 1)
        if self.most_blocks + blocks > BLOCKS:
            self.reset()
        self.most_blocks += blocks
        self.requests += 1
        request = self.requests
        self.harness.submit(submission(request, prompt, max_tokens=max_tokens, cache_salt=salt))
        self.harness.run()
        answer = stream_of(prompt, 0, max_tokens, frozenset())
        assert self.harness.reader.streams[100 * request] == answer
        cached = self.harness.reader.closed[request].usage.cached_tokens
        known = self.computed.setdefault(salt, [])
        shared = min(max((common(prompt, other) for other in known), default=0), len(prompt) - 1)
        assert cached == shared
        known.append((prompt + answer)[:-1])

    @rule(salt=st.sampled_from([b"", b"other"]), data=st.data())
    def ask_again(self, salt: bytes, data: st.DataObject) -> None:
        """Ask with the tokens of another request, its answer included, as a prompt."""
        if self.computed.get(salt):
            self.ask(data.draw(st.sampled_from(self.computed[salt]))[:40], salt, 2)

    @rule()
    def reset(self) -> None:
        self.harness.core.reset_prefix_cache()
        self.computed.clear()
        self.most_blocks = 0

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "harness"):
            self.harness.core.assert_invariants()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.assert_idle()


CHECKS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}
MACHINES = pytest.mark.parametrize("machine", [PoolMachine, PrefixMachine])


@MACHINES
def test_random_walks(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=40, **CHECKS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("machine", "walks"), [(PoolMachine, 10_000), (PrefixMachine, 2_000)])
def test_many_long_random_walks(machine: type[RuleBasedStateMachine], walks: int) -> None:
    """Fewer through the prefix cache: each step there serves a request to its end."""
    run_state_machine_as_test(machine, settings=settings(max_examples=walks, stateful_step_count=200, **CHECKS))
