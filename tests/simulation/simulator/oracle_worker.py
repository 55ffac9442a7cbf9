"""A worker whose right tokens are known, and which refuses every plan that a real one could not execute.

It remembers what every slot of the KV cache holds: the hash of all tokens up to that position. A row that is computed
must find its own past in its blocks, may write only where no other table points, and samples `token_after` of their
contents. Errors of a plan are reported to the simulation, not raised: the engine would take them for a worker fault.

Blocks that come back from a tier hold the stored contents, under any key and block that the scheduler names. Of an
speculative row any number of drafts is accepted; the others leave rubbish where they lay, as they do in a real cache.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from simulator.adapted import SimAdapters
from simulator.model import ToyGuide, draw_key, extend, start_of, token_after
from simulator.oracle_ready import describe
from simulator.tiers import SimTiers
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.copies import NO_STATE
from troupellm.protocol.messages.worker import (
    NULL_BLOCK,
    NewRow,
    ProgressSink,
    RowFork,
    RowLogprobs,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerReady,
)
from troupellm.tests.support.kv.toy_tiers import Content

Report = Callable[[str], None]
_RUBBISH = -1
"""In place of a cache group."""


class LaunchedStep(msgspec.Struct, frozen=True):
    step: int
    result: StepResult


class _Row:
    """The worker's state of a sequence. `states[i]` is the hash of its first i tokens."""

    __slots__ = ("adapter", "end", "epoch", "follow", "key", "logprobs", "num_computed", "slot", "states", "tables")

    def __init__(self, new: NewRow, adapters: SimAdapters) -> None:
        sampling = new.sampling
        self.adapter = new.adapter, adapters.held(new.adapter)
        """Its slot, and the digest of what was in it then."""
        self.epoch = new.epoch
        self.key = draw_key(sampling.temperature, sampling.seed, sampling.fork)
        self.logprobs = sampling.logprobs
        guide = None if sampling.guide is None else ToyGuide.read(sampling.guide.text)
        self.follow = token_after if guide is None else guide.token_after
        self.end = None if guide is None else new.num_prompt_tokens + guide.length
        """With so many tokens its guide is complete."""
        self.tables = [list(blocks) for blocks in new.blocks]
        self.states = [start_of(self.adapter[1])]
        for token in memoryview(new.token_ids).cast("i"):
            self.states.append(extend(self.states[-1], token))
        self.num_computed = 0
        self.slot = new.state
        """Its state slot."""


class OracleWorker:
    """`num_computed` counts positions, over the life of the worker."""

    def __init__(self, ready: WorkerReady, report: Report, random: Random, hit_rate: float) -> None:
        """hit_rate: how likely a draft is accepted."""
        self._ready = ready
        self._report = report
        self._random = random
        self._hit_rate = hit_rate
        self.adapters = SimAdapters(report)
        self.tiers: SimTiers | None = None
        self.num_accepted = self.num_rubbish = 0
        """Drafts."""
        self.num_computed = 0
        self.rows: dict[int, _Row] = {}
        self._described: list[RowLogprobs] = []
        """Of this step."""
        self._drafts: dict[int, tuple[int, int]] = {}
        """Of this step, by row: how many were verified, and how many of them accepted."""
        self._loading: set[int] = set()
        """Blocks that are being loaded."""
        self._complete: list[int] = []
        """Rows whose guide is, with this step."""
        self.content: list[list[tuple[int, int] | None]] = [[None] * ready.block_size for _ in range(ready.num_blocks)]
        """Per block, of which group it holds a position, and the hash up to it."""
        self.slots: list[int | None] = [_RUBBISH] * ready.state_slots
        """The hash of the tokens that each state stands for; None of no token."""

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        return self._ready

    def reset(self) -> None:
        self._empty()
        if self.tiers is not None:
            self.tiers.forget()

    def fall_asleep(self, *, keeps_host: bool) -> None:
        """The cache's memory is given back, and that of the host tier as well or not."""
        self._empty()
        if self.tiers is not None:
            self.tiers.fall_asleep(keeps_host=keeps_host)

    def _empty(self) -> None:
        self.adapters.forget()
        self.rows.clear()
        self.slots = [_RUBBISH] * len(self.slots)
        for block in self.content:
            block[:] = [None] * len(block)

    def close(self) -> None:
        self.rows.clear()

    def collect(self, ticket: LaunchedStep) -> StepResult:
        return ticket.result

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if len(set(plan.rows)) != len(plan.rows):
            self._report(f"step {plan.step} names a row twice")
        if self.tiers is not None:
            self.tiers.disturb()
            self._checked(lambda: self._begin_transfers(plan))
        self.adapters.change(plan.adapters)
        for row in plan.freed_rows:
            if self.rows.pop(row, None) is None:
                self._report(f"step {plan.step} retires row {row}, which the worker does not know")
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        for new in plan.new_rows:
            self._add(new, starts.get(new.row, 0))
        self._fork(plan.forks)
        for change in plan.changes:
            for group, table in enumerate(self.rows[change.row].tables):
                del table[len(table) - change.dropped_blocks :]
                table.extend(change.appended_blocks[group] if change.appended_blocks else ())
        copied = [list(self.content[copy.source]) for copy in plan.copies]
        for copy, content in zip(plan.copies, copied, strict=True):
            self.content[copy.target] = content
        states = [None if copy.source == NO_STATE else self.slots[copy.source] for copy in plan.states]
        for state_copy, state in zip(plan.states, states, strict=True):
            self.slots[state_copy.target] = state
        self._described.clear()
        self._complete.clear()
        limits = plan.draft_limits or (-1,) * len(plan.rows)
        if sum(plan.counts) + sum(max(0, limit) for limit in limits) > self._ready.step_tokens:
            self._report(f"step {plan.step} may exceed the tokens of a step: {plan.counts}, limits {limits}")
        self._drafts.clear()
        columns = zip(plan.rows, plan.epochs, plan.starts, plan.counts, limits, strict=True)
        sampled = [self._compute(*column) for column in columns]
        drafts = [self._drafts.get(row, (0, 0)) for row in plan.rows] if any(map(any, self._drafts.values())) else []
        return self._ticket(
            plan,
            StepResult(
                step=plan.step,
                engine_epoch=plan.engine_epoch,
                rows=plan.rows,
                epochs=plan.epochs,
                token_counts=tuple([len(tokens) for tokens in sampled]),
                tokens=tuple([token for tokens in sampled for token in tokens]),
                drafted=tuple([drafted for drafted, _ in drafts]),
                accepted=tuple([accepted for _, accepted in drafts]),
                logprobs=tuple(self._described),
                finished=tuple(self._complete),
                timings=StepTimings(forward=0.001),
            ),
        )

    def _ticket(self, plan: StepPlan, result: StepResult) -> LaunchedStep:
        """With what has become of transfers."""
        if self.tiers is None:
            return LaunchedStep(plan.step, result)
        answers = self._checked(self.tiers.answer_all) or ((), (), ())
        result = msgspec.structs.replace(result, transfers=answers[0], found=answers[1], tiers=answers[2])
        return LaunchedStep(plan.step, result)

    def _begin_transfers(self, plan: StepPlan) -> None:
        assert self.tiers is not None
        self.tiers.begin(plan)
        self._loading = self.tiers.loading()

    def _checked(self, call: Callable[[], Any]) -> Any:
        """Report the refusals of the tiers."""
        try:
            return call()
        except AssertionError as error:
            self._report(f"tiers: {error}")
            return None

    def read_block(self, block: int) -> Content:
        return tuple(self.content[block])

    def write_block(self, block: int, content: Content | None) -> None:
        held: list[Any] = [(_RUBBISH, 0)] * self._ready.block_size if content is None else list(content)
        self.content[block] = held

    def held(self, block: int) -> tuple[tuple[int, int] | None, ...]:
        """The contents of a block."""
        return tuple(self.content[block])

    def _add(self, new: NewRow, start: int) -> None:
        known = self.rows.get(new.row)
        if known is not None and known.epoch >= new.epoch:
            self._report(f"row {new.row} comes anew under epoch {new.epoch}, the worker has {known.epoch}")
        row = self.rows[new.row] = _Row(new, self.adapters)
        row.num_computed = start

    def _fork(self, forks: Sequence[RowFork]) -> None:
        """Rows go on from what their parents were before this step."""
        parents = [(self.rows[fork.parent].states, self.rows[fork.parent].tables) for fork in forks]
        for fork, (states, tables) in zip(forks, parents, strict=True):
            row = self.rows[fork.row]
            row.states = states[: fork.num_tokens + 1]
            row.states.append(extend(row.states[-1], fork.token_id))
            row.tables = [list(table) for table in tables]
            row.num_computed = fork.num_tokens

    def _compute(self, number: int, epoch: int, start: int, count: int, limit: int) -> Sequence[int]:
        row = self.rows.get(number)
        if row is None or row.epoch != epoch:
            self._report(f"row {number} is planned under an epoch that the worker does not know")
            return ()
        slot, digest = row.adapter
        if self.adapters.held(slot) != digest:
            self._report(f"row {number} is computed in slot {slot}, which holds another adapter by now")
        if limit >= 0:
            return self._verify(number, row, start, limit)
        end = start + count
        if start != row.num_computed or not 0 < count <= len(row.states) - 1 - start:
            self._report(f"row {number} computes {start} to {end}, has {row.num_computed} of {len(row.states) - 1}")
            return ()
        if self.slots:
            if self.slots[row.slot] != (row.states[start] if start else None):
                self._report(f"row {number} computes from {start} on, and its state stands for something else")
            self.slots[row.slot] = row.states[end]
        self._forward(number, row, end, end)
        return self._draw(number, row, 1) if end == len(row.states) - 1 else ()

    def _verify(self, number: int, row: _Row, start: int, limit: int) -> Sequence[int]:
        """A speculative row: the worker knows where it is, and has drafts of its own."""
        first, known = row.num_computed, len(row.states) - 1
        if start > first:
            self._report(f"row {number} computes from {start} on at least, has {first}")
            return ()
        room = limit + 1 - (known - first)
        if room < 0:
            self._forward(number, row, first + limit + 1, first + limit + 1)
            return ()
        if row.end is not None:  # what a guide forbids is not drafted
            room = max(0, min(room, row.end - known - 1))
        drafted, hits = self._random.randint(0, room), 0
        while hits < drafted and self._random.random() < self._hit_rate:
            hits += 1
        self._extend(row, hits)
        self._forward(number, row, known + hits, known + drafted)
        self._drafts[number] = (drafted, hits)
        self.num_accepted += hits
        del row.states[known + 1 :]  # they are drawn like all others
        return self._draw(number, row, hits + 1)

    def _forward(self, number: int, row: _Row, end: int, drafted: int) -> None:
        """Compute what the row holds, up to a position; behind that refused drafts, up to another one."""
        start = row.num_computed
        for group, table in enumerate(row.tables):
            self._read(number, row, group, table, start)
            self._write(number, row, group, table, start, end, drafted)
        row.num_computed = end
        self.num_computed += end - start

    def _draw(self, number: int, row: _Row, count: int) -> Sequence[int]:
        """The next tokens of a row; where drafts are verified, a guide sometimes forces those that follow."""
        before = len(row.states) - 1
        if row.end is not None and self._ready.most_drafts and self._random.random() < 0.4:
            count = max(count, min(count + self._random.randint(1, 4), row.end - before))
        tokens = self._extend(row, count)
        if row.logprobs >= 0:
            drawn = list(zip(row.states[before:], tokens, strict=False))
            self._described.append(describe(number, before, drawn, row.logprobs))
        if len(row.states) - 1 == row.end:
            self._complete.append(number)
        return tokens

    @staticmethod
    def _extend(row: _Row, count: int) -> list[int]:
        tokens = []
        for _ in range(count):
            tokens.append(row.follow(row.states[-1], row.key))
            row.states.append(extend(row.states[-1], tokens[-1]))
        return tokens

    def _read(self, number: int, row: _Row, group: int, table: list[int], start: int) -> None:
        """Attention over what the token at `start` sees of everything before it."""
        size = self._ready.block_size
        first = self._first_seen(group, start)
        for index in range(first // size, -(-start // size)):
            begin, end = max(first, index * size), min(start, index * size + size)
            right = [(group, state) for state in row.states[begin + 1 : end + 1]]
            block = table[index]
            if block in self._loading:
                self._report(f"row {number} reads block {block} (group {group}), which is being loaded")
            if block == NULL_BLOCK or self.content[block][begin - index * size : end - index * size] != right:
                self._report(f"row {number} reads block {block} (group {group}), which holds something else")

    def _write(self, number: int, row: _Row, group: int, table: list[int], start: int, end: int, drafted: int) -> None:
        """Positions up to `end` are the row's, those from there to `drafted` were refused."""
        size = self._ready.block_size
        if drafted > len(table) * size:
            self._report(f"row {number} has blocks for {len(table) * size} positions and computes up to {drafted}")
            return
        for block in table[start // size : (drafted - 1) // size + 1]:
            if block in self._loading:
                self._report(f"row {number} writes block {block} (group {group}), which is being loaded")
            for other, neighbour in self.rows.items():
                if other != number and self._sees(neighbour, block):
                    self._report(f"rows {number} and {other} share block {block}, and {number} writes it")
        for position in range(start, end):
            self.content[table[position // size]][position % size] = (group, row.states[position + 1])
        for position in range(end, drafted):
            self.num_rubbish += 1
            self.content[table[position // size]][position % size] = (_RUBBISH, self.num_rubbish)

    def _first_seen(self, group: int, start: int) -> int:
        """The first position that the token at `start` sees."""
        window = self._ready.groups[group].sliding_window
        return 0 if window is None else max(0, start + 1 - window)

    def _sees(self, row: _Row, block: int) -> bool:
        """True if a row that goes on will read or write a block. Entries of its tables behind a window are old."""
        size = self._ready.block_size
        return any(
            block in table[self._first_seen(group, row.num_computed) // size :]
            for group, table in enumerate(row.tables)
        )
