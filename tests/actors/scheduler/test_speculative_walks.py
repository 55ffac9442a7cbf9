"""Random walks with drafts: any number of them accepted, forced tokens, two plans in flight, and all that can happen.

After every call the invariants hold; the shown tokens are the solo run's, all of them unless the request was disturbed;
and
every block is back in the end.
"""

import random

import pytest
from drafting_oracle import GUIDED, drafting_harness
from oracle import EOS, Harness, ready, stream_of, submission

from troupellm.protocol.errors import ContextLengthExceeded, RequestFailed
from troupellm.protocol.messages.worker import SamplingState

STOPS = frozenset({EOS, 1})
PREFIXES = ([], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9])


class Walk:
    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        num_blocks, block_size, drafts = dice.randint(5, 14), dice.choice([1, 2, 4]), dice.choice([1, 2, 4, 7])
        windows = dice.choice([(None,), (None,), (None, None), (None, 3), (5,), (None, 2, 6), (4, None)])
        self.capacity = num_blocks * block_size
        made = ready(num_blocks, block_size, max_model_len=self.capacity + 2, windows=windows, most_drafts=drafts)
        self.harness: Harness = drafting_harness(
            made,
            drafts=drafts,
            seed=seed,
            hit_rate=dice.choice([0.0, 0.5, 0.8, 1.0]),
            schedule=dice.choice([(), (), ((1, 1, 1), (3, 64, 0))]),
            caching=dice.random() < 0.7,
            max_num_seqs=dice.randint(1, 5),
            max_num_batched_tokens=dice.choice([1, 5, 12, 64, 64]),
            max_plans_in_flight=dice.choice([1, 2, 2]),
            enable_chunked_prefill=dice.random() < 0.6,
            scheduling_policy=dice.choice(["fair", "fcfs", "priority"]),
            max_num_prefill_tokens=dice.choice(["auto", 1, 2, 5]),
        )
        self.right: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.disturbed: set[int] = set()
        self.paused: set[int] = set()
        self.cut: set[int] = set()

    def submit(self) -> None:
        dice, request = self.dice, len(self.rows) + 1
        rows, max_tokens = dice.choice([1, 1, 1, 2, 3]), dice.randint(1, 16)
        prompt = dice.choice(PREFIXES) + [dice.randint(1, 3) for _ in range(dice.randint(1, 6))]
        limit = min(max_tokens, self.capacity + 2 - len(prompt))
        least = dice.choice([0, 0, 2]) if max_tokens > 1 else 0
        self.rows[request] = rows
        for fork in range(rows):
            self.right[100 * request + fork] = stream_of(prompt, fork, limit, STOPS, least) if limit > 0 else []
        self.harness.submit(
            submission(
                request,
                prompt,
                rows,
                max_tokens=max_tokens,
                min_tokens=least,
                tenant=dice.choice(["", "a", "b"]),
                sampling=GUIDED if dice.random() < 0.3 else SamplingState(),
                eos_token_ids=frozenset({EOS}),
                stop_token_ids=frozenset({1}),
            )
        )

    def interfere(self) -> None:
        """Abort, pause, resume, a stop string, a failing row, a lost worker."""
        dice, core = self.dice, self.harness.core
        alive = [request for request in self.rows if request not in self.harness.reader.closed]
        what = dice.choice(["abort", "pause", "pause", "resume", "stop", "break", "lose"])
        if what == "abort" and alive:
            request = dice.choice(alive)
            self.disturbed.add(request)
            self.harness.abort(request)
        elif what == "pause" and alive:
            self.paused.add(dice.choice(alive))
            core.pause(max(self.paused))
        elif what == "resume" and self.paused:
            core.resume(self.paused.pop())
        elif what == "stop" and self.harness.reader.streams:
            row = dice.choice(sorted(self.harness.reader.streams))
            self.cut |= {row} - self.harness.reader.finished.keys()
            core.stop_string_met(row)
        elif what == "break" and self.harness.oracle.rows:
            self.harness.oracle.broken_rows.add(dice.choice(sorted(self.harness.oracle.rows)))
        elif what == "lose":
            self.harness.lose(fault=dice.random() < 0.5)
        core.assert_invariants()

    def go(self, operations: int) -> None:
        for _ in range(operations):
            turn = self.dice.random()
            if turn < 0.2:
                self.submit()
            elif turn < 0.35:
                self.harness.plan()
            elif turn < 0.85:
                self.harness.step()
            else:
                self.interfere()
        self.harness.oracle.broken_rows.clear()
        for request in self.paused:
            self.harness.core.resume(request)
        self.harness.run()
        self.check()

    def check(self) -> None:
        reader = self.harness.reader
        assert reader.closed.keys() == self.rows.keys(), "a request was not closed"
        self.harness.assert_idle()
        self.harness.core.assert_invariants()
        for request, closed in reader.closed.items():
            rows = range(100 * request, 100 * request + self.rows[request])
            assert closed.usage.completion_tokens == sum(len(reader.streams.get(row, [])) for row in rows)
            for row in rows:
                stream, right = reader.streams.get(row, []), self.right[row]
                assert stream == right[: len(stream)], "the stream is not the solo run's"
                if closed.error is None and row not in self.cut:
                    assert stream == right, "the stream ended too soon"
            if closed.error is not None and request not in self.disturbed:
                assert isinstance(closed.error, ContextLengthExceeded | RequestFailed)


def test_random_walks_with_drafts() -> None:
    drafted = accepted = 0
    for seed in (*range(60), 6155):
        walk = Walk(seed)
        walk.go(100 if seed == 6155 else 40)
        drafted += walk.harness.oracle.drafted
        accepted += walk.harness.oracle.accepted
    assert drafted > accepted > 150, "the walks hardly tried it"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_long_random_walks_with_drafts() -> None:
    for seed in range(1000, 9000):
        try:
            Walk(seed).go(100)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
