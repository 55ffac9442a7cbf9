"""A scheduler by hand for a model runner, and prompts of random tokens."""

import random

import numpy as np
import torch

from troupellm.models.runner.runner import ModelRunner
from troupellm.protocol.messages.copies import NO_STATE, StateCopy
from troupellm.protocol.messages.worker import AdapterSlot, NewRow, RowChange, SamplingState, StepPlan, StepResult


class Driver:
    """A scheduler by hand: rows with a cursor, blocks handed out in random order."""

    def __init__(self, runner: ModelRunner, seed: int = 3) -> None:
        self.runner = runner
        self.free = list(range(runner.cache.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.adapters: dict[int, int] = {}
        self.slots: tuple[AdapterSlot, ...] = ()
        """For the next step."""
        self.step = 0

    def submit(self, row: int, prompt: list[int], adapter: int = 0) -> None:
        self.adapters[row] = adapter
        self.tokens[row], self.prompts[row], self.done[row], self.held[row] = list(prompt), len(prompt), 0, 0

    def run(self, spans: dict[int, int]) -> StepResult:
        """Compute so many tokens of each row."""
        new, changes, begun = [], [], []
        for row, count in spans.items():
            blocks = self._blocks_for(row, self.done[row] + count)
            if self.done[row] == 0:
                ids = np.array(self.tokens[row], dtype="<i4").tobytes()
                state = SamplingState(temperature=0.0)
                new.append(
                    NewRow(
                        row=row,
                        epoch=1,
                        request_id=str(row),
                        token_ids=ids,
                        num_prompt_tokens=self.prompts[row],
                        sampling=state,
                        blocks=(blocks,),
                        adapter=self.adapters[row],
                        state=row,
                    )
                )
                if self.runner.cache.states is not None:
                    begun.append(StateCopy(NO_STATE, row))
            elif blocks:
                changes.append(RowChange(row=row, appended_blocks=(blocks,)))
        rows = tuple(spans)
        result = self.runner.run(
            StepPlan(
                step=self.step,
                engine_epoch=0,
                rows=rows,
                epochs=(1,) * len(rows),
                new_rows=tuple(new),
                starts=tuple(self.done[row] for row in rows),
                counts=tuple(spans.values()),
                changes=tuple(changes),
                adapters=self.slots,
                states=tuple(begun),
            )
        )
        self.slots = ()
        self.step += 1
        tokens = iter(result.tokens)
        for row, count in zip(rows, result.token_counts, strict=True):
            self.done[row] += spans[row]
            self.tokens[row] += [next(tokens) for _ in range(count)]
        assert result.errors == ()
        return result

    def generate(self, row: int, new_tokens: int) -> None:
        while self.generated(row) < new_tokens:
            self.run({row: len(self.tokens[row]) - self.done[row]})

    def generated(self, row: int) -> int:
        return len(self.tokens[row]) - self.prompts[row]

    def answer(self, row: int) -> list[int]:
        return self.tokens[row][self.prompts[row] :]

    def _blocks_for(self, row: int, length: int) -> tuple[int, ...]:
        needed = -(-length // self.runner.cache.block_size) - self.held[row]
        self.held[row] += max(needed, 0)
        return tuple(self.free.pop() for _ in range(needed))


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()
