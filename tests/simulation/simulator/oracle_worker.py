"""A worker whose right tokens are known, and which refuses every plan that a real one could not execute.

It remembers what every slot of the KV cache holds: the hash of all tokens up to that position. A row that is computed
must find its own past in its blocks, may write only where nobody else's table points, and samples `token_after` what it
holds. What is wrong with a plan is reported to the simulation, not raised: the engine would take it for a worker fault.
"""

from array import array
from collections.abc import Callable, Sequence

import msgspec

from simulator.model import ToyGuide, draw_key, extend, ranking, token_after
from troupellm.protocol.config import EngineConfig
from troupellm.protocol.worker import (
    NULL_BLOCK,
    CacheGroup,
    NewRow,
    ProgressSink,
    RowFork,
    RowLogprobs,
    StepPlan,
    StepResult,
    StepTimings,
    WorkerReady,
)

Report = Callable[[str], None]
PLAIN = -1
"""Limit of a row that computes just its span."""


class Ticket(msgspec.Struct, frozen=True):
    step: int
    result: StepResult


class _Row:
    """What the worker knows of a sequence. `states[i]` is the hash of its first i tokens."""

    __slots__ = ("end", "epoch", "follow", "key", "logprobs", "num_computed", "states", "tables")

    def __init__(self, new: NewRow) -> None:
        sampling = new.sampling
        self.epoch = new.epoch
        self.key = draw_key(sampling.temperature, sampling.seed, sampling.fork)
        self.logprobs = sampling.logprobs
        guide = None if sampling.guide is None else ToyGuide.read(sampling.guide.text)
        self.follow = token_after if guide is None else guide.token_after
        self.end = None if guide is None else new.num_prompt_tokens + guide.length
        """With so many tokens its guide is complete."""
        self.tables = [list(blocks) for blocks in new.blocks]
        self.states = [0]
        for token in memoryview(new.token_ids).cast("i"):
            self.states.append(extend(self.states[-1], token))
        self.num_computed = 0


class OracleWorker:
    """`num_computed` counts positions, over the life of the worker."""

    def __init__(self, ready: WorkerReady, report: Report) -> None:
        self._ready = ready
        self._report = report
        self.num_computed = 0
        self.rows: dict[int, _Row] = {}
        self._described: list[RowLogprobs] = []
        """Of this step."""
        self._drafts: dict[int, tuple[int, int]] = {}
        """Of rows of this step that had any: how many drafts, and how many of them were right."""
        self._complete: list[int] = []
        """Rows whose guide is, with this step."""
        self.content: list[list[tuple[int, int] | None]] = [[None] * ready.block_size for _ in range(ready.num_blocks)]
        """Per block, of which group it holds a position, and the hash up to it."""

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        return self._ready

    def reset(self) -> None:
        self.rows.clear()
        for block in self.content:
            block[:] = [None] * len(block)

    def close(self) -> None:
        self.rows.clear()

    def collect(self, ticket: Ticket) -> StepResult:
        return ticket.result

    def launch(self, plan: StepPlan) -> Ticket:
        if len(set(plan.rows)) != len(plan.rows):
            self._report(f"step {plan.step} names a row twice")
        for row in plan.retired:
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
        self._described.clear()
        self._complete.clear()
        self._drafts.clear()
        limits = plan.draft_limits or (PLAIN,) * len(plan.rows)
        columns = zip(plan.rows, plan.epochs, plan.starts, plan.counts, limits, strict=True)
        sampled = [
            self._compute(number, epoch, start, count) if limit == PLAIN else self._verify(number, epoch, start, limit)
            for number, epoch, start, count, limit in columns
        ]
        drafts = [self._drafts.get(number, (0, 0)) for number in plan.rows] if self._drafts else []
        return Ticket(
            plan.step,
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

    def held(self, block: int) -> tuple[tuple[int, int] | None, ...]:
        """What a block holds."""
        return tuple(self.content[block])

    def _add(self, new: NewRow, start: int) -> None:
        known = self.rows.get(new.row)
        if known is not None and known.epoch >= new.epoch:
            self._report(f"row {new.row} comes anew under epoch {new.epoch}, the worker has {known.epoch}")
        row = self.rows[new.row] = _Row(new)
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

    def _compute(self, number: int, epoch: int, start: int, count: int) -> Sequence[int]:
        row = self.rows.get(number)
        if row is None or row.epoch != epoch:
            self._report(f"row {number} is planned under an epoch that the worker does not know")
            return ()
        end = start + count
        if start != row.num_computed or not 0 < count <= len(row.states) - 1 - start:
            self._report(f"row {number} computes {start} to {end}, has {row.num_computed} of {len(row.states) - 1}")
            return ()
        for group, table in enumerate(row.tables):
            self._read(number, row, group, table, start)
            self._write(number, row, group, table, start, end)
        row.num_computed = end
        self.num_computed += count
        if end < len(row.states) - 1:
            return ()
        token = row.follow(row.states[-1], row.key)
        if row.logprobs >= 0:
            self._described.append(_describe(number, end, row.states[-1], token, row.logprobs))
        row.states.append(extend(row.states[-1], token))
        if end + 1 == row.end:
            self._complete.append(number)
        return (token,)

    def _verify(self, number: int, epoch: int, start: int, limit: int) -> Sequence[int]:
        """Of an elastic row. How many drafts it has, and how many of them are right, follows from its tokens."""
        row = self.rows.get(number)
        if row is None or row.epoch != epoch:
            self._report(f"row {number} is planned under an epoch that the worker does not know")
            return ()
        known = len(row.states) - 1
        if start > row.num_computed or row.num_computed != known - 1:
            self._report(f"row {number} goes on from {start} at least, has {row.num_computed} of {known}")
            return ()
        dice = abs(row.states[-1])
        room = limit if row.end is None else max(0, min(limit, row.end - known - 1))
        drafted = dice // 7 % (room + 1)
        right = dice // 1009 % (drafted + 1)
        if drafted:
            self._drafts[number] = drafted, right
        tokens: list[int] = []
        before = len(self._described)
        for _ in range(right + 1):
            tokens += self._compute(number, epoch, row.num_computed, 1)
        self._described[before:] = _joined(self._described[before:])
        end = known + drafted
        for table in row.tables if drafted > right else ():
            if end > len(table) * self._ready.block_size:
                self._report(f"row {number} has no blocks for {drafted} drafts behind {known} tokens")
                return tokens
            for position in range(row.num_computed, end):
                index, place = divmod(position, self._ready.block_size)
                self.content[table[index]][place] = None
        return tokens

    def _read(self, number: int, row: _Row, group: int, table: list[int], start: int) -> None:
        """Attention over what the token at `start` sees of everything before it."""
        size = self._ready.block_size
        first = self._first_seen(group, start)
        for index in range(first // size, -(-start // size)):
            begin, end = max(first, index * size), min(start, index * size + size)
            right = [(group, state) for state in row.states[begin + 1 : end + 1]]
            block = table[index]
            if block == NULL_BLOCK or self.content[block][begin - index * size : end - index * size] != right:
                self._report(f"row {number} reads block {block} (group {group}), which holds something else")

    def _write(self, number: int, row: _Row, group: int, table: list[int], start: int, end: int) -> None:
        size = self._ready.block_size
        if end > len(table) * size:
            self._report(f"row {number} has blocks for {len(table) * size} positions and computes up to {end}")
            return
        for block in table[start // size : (end - 1) // size + 1]:
            for other, neighbour in self.rows.items():
                if other != number and self._sees(neighbour, block):
                    self._report(f"rows {number} and {other} share block {block}, and {number} writes it")
        for position in range(start, end):
            self.content[table[position // size]][position % size] = (group, row.states[position + 1])

    def _first_seen(self, group: int, start: int) -> int:
        """The first position that the token at `start` sees."""
        window = self._ready.groups[group].sliding_window
        return 0 if window is None else max(0, start + 1 - window)

    def _sees(self, row: _Row, block: int) -> bool:
        """Whether a row that goes on will read a block, or write it. What its tables hold behind a window is old."""
        size = self._ready.block_size
        return any(
            block in table[self._first_seen(group, row.num_computed) // size :]
            for group, table in enumerate(row.tables)
        )


def _describe(row: int, position: int, state: int, token: int, alternatives: int) -> RowLogprobs:
    """The token behind a state, and the likeliest ones."""
    ranked = ranking(state)
    rank = next(place for place, (_, other) in enumerate(ranked) if other == token)
    columns = [ranked[rank], *ranked[:alternatives]]
    return RowLogprobs(
        row=row,
        position=position,
        width=len(columns),
        token_ids=array("i", [other for _, other in columns]).tobytes(),
        logprobs=array("f", [logprob for logprob, _ in columns]).tobytes(),
        ranks=array("i", [rank + 1]).tobytes(),
    )


def _joined(entries: list[RowLogprobs]) -> list[RowLogprobs]:
    """What is said of consecutive tokens of a row, as one; none stays none."""
    if len(entries) < 2:
        return entries
    first = entries[0]
    return [
        RowLogprobs(
            row=first.row,
            position=first.position,
            width=first.width,
            token_ids=b"".join(entry.token_ids for entry in entries),
            logprobs=b"".join(entry.logprobs for entry in entries),
            ranks=b"".join(entry.ranks for entry in entries),
        )
    ]


def worker_ready(
    width: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    windows: Sequence[int | None],
    step_tokens: int,
    most_drafts: int = 0,
) -> WorkerReady:
    """What a simulated worker says when it is loaded. num_blocks: per group; they are in one pool."""
    return WorkerReady(
        vocab_width=width, max_model_len=max_model_len, num_blocks=num_blocks * len(windows),
        block_size=block_size, step_tokens=step_tokens, most_drafts=most_drafts,
        groups=tuple(CacheGroup(num_layers=1, sliding_window=window) for window in windows),
        dtype="float32", device="cpu", architecture="Oracle",
        num_parameters=0, weight_bytes=0, kv_cache_bytes=0, activation_bytes=0, memory_free_bytes=0, load_seconds=0.0,
    )  # fmt: skip
