"""Plans as a scheduler writes them, and what the CPU's runner made of them: to be given to another runner."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from troupellm.models.runner.runner import ModelRunner
from troupellm.protocol.messages.worker import (
    BlockCopy,
    NewRow,
    RowChange,
    RowFork,
    SamplingState,
    StepPlan,
    StepResult,
    StepTimings,
)


@dataclass
class Known:
    """A row of the script."""

    epoch: int
    prompt: int
    tokens: list[int]
    done: int = 0
    held: int = 0


@dataclass
class Script:
    """Runs steps on one runner and writes them down. A step's tokens are not looked at before the next one is planned,
    except where a row is told anew."""

    runner: ModelRunner
    num_blocks: int
    seed: int = 3
    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    known: dict[int, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self.free)
        self._new: list[NewRow] = []
        self._epochs: dict[int, int] = {}

    def add(self, row: int, prompt: list[int], *, known: int | None = None, adapter: int = 0, **sampling: Any) -> None:
        """With the next step. known: how many of the tokens are the prompt, if others follow it; adapter: a slot."""
        epoch = self._epochs[row] = self._epochs.get(row, 0) + 1
        self.known[row] = Known(epoch, known or len(prompt), list(prompt))
        state = SamplingState(**{"temperature": 0.0, **sampling})
        ids = np.array(prompt, dtype="<i4").tobytes()
        self._new.append(
            NewRow(
                row=row,
                epoch=epoch,
                request_id=str(row),
                token_ids=ids,
                num_prompt_tokens=self.known[row].prompt,
                sampling=state,
                blocks=((),) * self.runner.rows.num_groups,
                adapter=adapter,
            )
        )

    def step(self, spans: dict[int, int], **more: Any) -> StepResult:
        """Compute so many tokens of each row."""
        new, changes = {row.row: row for row in self._new}, list(more.pop("changes", ()))
        self._new = []
        for row, count in spans.items():
            blocks = self._blocks(row, self.known[row].done + count)
            if row in new:
                new[row] = msgspec.structs.replace(new[row], blocks=blocks)
            elif any(blocks):
                changes.append(RowChange(row=row, appended_blocks=blocks))
        rows = tuple(spans)
        plan = StepPlan(
            step=len(self.plans),
            engine_epoch=0,
            rows=rows,
            epochs=tuple(self.known[row].epoch for row in rows),
            starts=tuple(self.known[row].done for row in rows),
            counts=tuple(spans.values()),
            new_rows=tuple(new.values()),
            changes=tuple(changes),
            **more,
        )
        result = self.runner.run(plan)
        tokens = iter(result.tokens)
        for row, count in zip(rows, result.token_counts, strict=True):
            self.known[row].done += spans[row]
            self.known[row].tokens += [next(tokens) for _ in range(count)]
        self.plans.append(plan)
        self.results.append(plain(result))
        return result

    def decode(self, *rows: int, steps: int = 1) -> None:
        for _ in range(steps):
            self.step({row: len(self.known[row].tokens) - self.known[row].done for row in rows})

    def fork(self, row: int, parent: int, kept: int, token: int) -> tuple[RowFork, BlockCopy | None, RowChange]:
        """Let a row go on from another one: what the plan needs for it. The last block is copied."""
        source, size = self.known[parent], self.runner.cache.block_size
        tables = self.runner.rows.tables(parent)
        full = kept // size
        fresh = self.free.pop()
        copy = BlockCopy(0, tables[0][full], fresh) if kept % size else None
        change = RowChange(row=row, dropped_blocks=len(tables[0]) - full, appended_blocks=((fresh,),))
        entry = self.known[row]
        entry.tokens, entry.done, entry.held = [*source.tokens[:kept], token], kept, full + 1
        return RowFork(row, parent, kept, token), copy, change

    def _blocks(self, row: int, length: int) -> tuple[tuple[int, ...], ...]:
        entry = self.known[row]
        needed = max(-(-length // self.runner.cache.block_size) - entry.held, 0)
        entry.held += needed
        return tuple(tuple(self.free.pop() for _ in range(needed)) for _ in range(self.runner.rows.num_groups))


def plain(result: StepResult) -> StepResult:
    """Without what it took, and what graphs came of it."""
    return msgspec.structs.replace(result, timings=StepTimings(), graphs=None)
