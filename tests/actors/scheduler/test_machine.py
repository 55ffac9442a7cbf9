"""Random walks over everything that can happen to the scheduler, against the oracle.

After every operation the invariants hold. At the end every request is closed exactly once, the shown tokens are a
prefix of the right stream (all of it unless the request was disturbed), and every block is back.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from troupellm.protocol.errors import ContextLengthExceeded, RequestFailed
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

PREFIXES = ([], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 14),
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([(None,), (None,), (None, None), (None, 3), (5,), (None, 2, 6), (4, None)]),
        caching=st.booleans(),
        burst=st.sampled_from([1, 1, 1, 3]),
        resets=st.sampled_from([False, False, True]),
        state_slots=st.sampled_from([0, 0, 2, 3, 8]),
        borders=st.sampled_from([0, 1, 2]),
        config=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(1, 5),
                "max_num_batched_tokens": st.sampled_from([1, 3, 8, 64]),
                "max_plans_in_flight": st.sampled_from([1, 2]),
                "enable_chunked_prefill": st.booleans(),
                "scheduling_policy": st.sampled_from(["fair", "fair", "fcfs", "priority"]),
                "max_num_prefill_tokens": st.sampled_from(["auto", 1, 2, 5]),
            }
        ),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...],
        caching: bool,
        burst: int,
        resets: bool,
        state_slots: int,
        borders: int,
        config: dict[str, Any],
    ) -> None:
        self.resets = resets
        if config["max_plans_in_flight"] == 2:
            burst = 1  # drafts are verified with one plan in flight
        longest, self.stateful = num_blocks * block_size + 2, state_slots > 0
        config["state_snapshot_interval"] = borders * block_size
        made = ready(num_blocks, block_size, max_model_len=longest, windows=windows, state_slots=state_slots)
        self.capacity = num_blocks * block_size
        self.most_rows = config["max_num_seqs"]
        self.too_wide: set[int] = set()
        self.harness = Harness(make_core(made, caching=caching, **config), made, burst=burst)
        self.right: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.least: dict[int, int] = {}
        """Tokens before which nothing stops a request's sequences."""
        self.disturbed: set[int] = set()
        self.paused: set[int] = set()
        self.cut: set[int] = set()

    def open(self) -> list[int]:
        return [request for request in self.rows if request not in self.harness.reader.closed]

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=6),
        rows=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 12),
        min_tokens=st.sampled_from([0, 0, 2]),
        priority=st.integers(0, 1),
        salt=st.sampled_from([b"", b"", b"tenant"]),
        tenant=st.sampled_from(["", "a", "b"]),
        beams=st.sampled_from([False, False, True]),
    )
    def submit(
        self,
        prefix: list[int],
        tail: list[int],
        rows: int,
        max_tokens: int,
        min_tokens: int,
        priority: int,
        salt: bytes,
        tenant: str,
        beams: bool,
    ) -> None:
        request = len(self.rows) + 1
        beams = beams and not self.stateful  # refused where requests are prepared
        min_tokens = 0 if beams else min(min_tokens, max_tokens)
        prompt = prefix + tail
        limit = min(max_tokens, self.capacity + 2 - len(prompt))
        stops = frozenset({EOS, 1})
        self.rows[request], self.least[request] = rows, min_tokens
        if beams and rows > self.most_rows:
            self.too_wide.add(request)
        searched = beams_of(prompt, rows, limit, stops) if beams and limit > 0 else [[]] * rows
        for fork in range(rows):
            stream = searched[fork] if beams else stream_of(prompt, fork, limit, stops, min_tokens)
            self.right[100 * request + fork] = stream if limit > 0 else []
        self.harness.submit(
            (beam_submission if beams else submission)(
                request,
                prompt,
                rows,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                priority=priority,
                cache_salt=salt,
                tenant=tenant,
                eos_token_ids=frozenset({EOS}),
                stop_token_ids=frozenset({1}),
            )
        )

    @rule()
    def plan(self) -> None:
        self.harness.plan()

    @precondition(lambda self: self.harness.oracle.pending)
    @rule()
    def finish(self) -> None:
        self.harness.finish()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.resets)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.core.reset_prefix_cache()
        self.harness.core.assert_invariants()
        assert self.harness.core.snapshot().blocks_cached == 0

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open()))
        self.disturbed.add(request)
        self.harness.abort(request)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open()))
        self.paused.add(request)
        self.harness.core.pause(request)
        self.harness.core.assert_invariants()

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.paused)))
        self.paused.discard(request)
        self.harness.core.resume(request)
        self.harness.core.assert_invariants()

    @precondition(lambda self: self.harness.reader.streams)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.harness.reader.streams)))
        if row not in self.harness.reader.finished:
            self.cut.add(row)
        self.harness.core.stop_string_met(row)
        self.harness.core.assert_invariants()

    @rule(fault=st.booleans())
    def lose(self, fault: bool) -> None:
        """The worker dies. A request that is alone under suspicion may be blamed, guilty or not."""
        self.harness.lose(fault=fault)

    @precondition(lambda self: self.harness.oracle.rows)
    @rule(data=st.data())
    def break_row(self, data: st.DataObject) -> None:
        self.harness.oracle.broken_rows.add(data.draw(st.sampled_from(sorted(self.harness.oracle.rows))))

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.oracle.broken_rows.clear()
        for request in self.paused:
            self.harness.core.resume(request)
        self.harness.run(most=2000 + 200 * len(self.rows))  # steps of a single token, with preemptions
        reader = self.harness.reader
        assert reader.closed.keys() == self.rows.keys(), "a request was not closed"
        self.harness.assert_idle()
        self.harness.core.assert_invariants()
        for request, closed in reader.closed.items():
            streams = [reader.streams.get(100 * request + fork, []) for fork in range(self.rows[request])]
            assert closed.usage.completion_tokens == sum(map(len, streams))
            self.check_streams(request, streams)
            if closed.error is not None and request not in self.disturbed:
                assert isinstance(closed.error, ContextLengthExceeded | RequestFailed) or request in self.too_wide

    def check_streams(self, request: int, streams: list[list[int]]) -> None:
        reader = self.harness.reader
        whole = reader.closed[request].error is None
        for fork, stream in enumerate(streams):
            row = 100 * request + fork
            right = self.right[row]
            assert stream == right[: len(stream)], "the stream is not the oracle's"
            if whole and row not in self.cut:
                assert stream == right, "the stream ended too soon"
                stopped = stream[-1] in (EOS, 1) and len(stream) >= self.least[request]
                assert reader.finished[row].reason == ("stop" if stopped else "length")


CHECKS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


def test_random_walks_keep_the_schedulers_invariants() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(max_examples=120, stateful_step_count=40, **CHECKS))


@pytest.mark.slow
@pytest.mark.timeout(10_800)
def test_many_long_random_walks_keep_the_schedulers_invariants() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=10_000, stateful_step_count=200, **CHECKS)
    )
