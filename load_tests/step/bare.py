"""The worker alone: plans as the scheduler would write them, two under way, nothing else around it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from troupellm.models.adapters.files import adapter_digest
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.worker.worker import LaunchedStep, ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.graph_report import GraphReport
from troupellm.protocol.messages.worker import AdapterSlot, NewRow, SamplingState, StepPlan, StepResult, WorkerReady

BLOCK_SIZE = 16
PREFILL_TOKENS = 2048
IN_FLIGHT = 2
Around = Callable[[], AbstractContextManager[object]]


class BareWorker:
    """A loaded worker whose rows all decode. Rows of a former batch are retired by the next. One that drafts must keep
    none of the drafts: plans are written beforehand, for rows that get one token in each step."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self._worker = ModelWorker(folder)
        self.ready: WorkerReady = self._worker.load(config, lambda progress: None)
        self._block_size, self._drafts = config.cache.block_size, self.ready.most_drafts
        self._step = 0
        self._rows: tuple[int, ...] = ()
        self._epochs: dict[int, int] = {}
        self._length = 0
        self._slots: tuple[AdapterSlot, ...] = ()
        self._random = np.random.default_rng(0)

    def load_adapters(self, folders: Sequence[Path]) -> None:
        """Put adapters into the slots from 1 on, with the next prompt.

        Raises:
            RuntimeError: one cannot be served.
        """
        for slot, folder in enumerate(folders, 1):
            digest = adapter_digest(folder)
            preparation = self._worker.prepare_adapter(digest, str(folder))
            if preparation.outcome != "prepared":
                raise RuntimeError(preparation.error)
            self._slots += (AdapterSlot(slot, digest),)

    def fill(self, batch: int, context: int, steps: int, *, shared: int = 0, adapters: int = 0) -> None:
        """Compute `batch` prompts of `context` random tokens, with room for `steps` more each.

        Args:
            shared: whole blocks of tokens before these, which all have in common and which are there once.
            adapters: slots that rows have in turns; 0 is the model alone.
        """
        freed_rows, self._rows, self._length = self._rows, tuple(range(batch)), shared + context
        prefix = self._tokens(shared)
        width = -(-(context + steps + self._drafts + 1) // self._block_size)
        for start in range(0, shared, PREFILL_TOKENS):
            count = min(PREFILL_TOKENS, shared - start)
            new: tuple[NewRow, ...] = () if start else (self._new_row(0, prefix, 0, shared),)
            self._run((0,), start, count, new, freed_rows)
            freed_rows = ()
        at_once = max(1, PREFILL_TOKENS // context)
        for first in range(0, batch, at_once):
            rows = self._rows[first : first + at_once]
            new = tuple(
                msgspec.structs.replace(
                    self._new_row(row, prefix + self._tokens(context), width, shared),
                    adapter=1 + row % adapters if adapters else 0,
                )
                for row in rows
            )
            self._run(rows, shared, context, new, freed_rows)
            freed_rows = ()

    def _tokens(self, count: int) -> bytes:
        return self._random.integers(0, self.ready.vocab_width, count).astype("<i4").tobytes()

    def _new_row(self, row: int, tokens: bytes, width: int, shared: int = 0) -> NewRow:
        """width: of its own blocks, behind those of the `shared` tokens."""
        common = shared // self._block_size
        own = range(common + row * width, common + (row + 1) * width)
        return NewRow(
            row=row,
            epoch=self._step,
            request_id=str(row),
            token_ids=tokens,
            num_prompt_tokens=len(tokens) // 4,
            sampling=SamplingState(temperature=0.0),
            blocks=((*range(common), *own),),
        )

    def _run(
        self, rows: tuple[int, ...], start: int, count: int, new: tuple[NewRow, ...], freed_rows: tuple[int, ...]
    ) -> StepResult:
        plan = self._plan(rows, start, count, new, freed_rows)
        return self._worker.collect(self._worker.launch(plan))

    def _plan(
        self,
        rows: tuple[int, ...],
        start: int,
        count: int,
        new: tuple[NewRow, ...] = (),
        freed_rows: tuple[int, ...] = (),
    ) -> StepPlan:
        self._step += 1
        self._epochs |= {row.row: row.epoch for row in new}
        epochs = tuple(self._epochs[row] for row in rows)
        slots, self._slots = self._slots, ()
        return StepPlan(
            step=self._step,
            engine_epoch=0,
            rows=rows,
            epochs=epochs,
            starts=(start,) * len(rows),
            counts=(count,) * len(rows),
            new_rows=new,
            freed_rows=freed_rows,
            adapters=slots,
        )

    def decode(self, steps: int, around: Around = nullcontext) -> list[float]:
        """Seconds from one step's result to the next one's, two steps under way at any time.

        Args:
            around: what each step is collected within; on a CPU that is all of the step.
        """
        plans = [self._plan(self._rows, self._length + number, 1) for number in range(steps)]  # the scheduler's work
        if self._drafts:
            limits = (self._drafts,) * len(self._rows)
            plans = [msgspec.structs.replace(plan, draft_limits=limits) for plan in plans]
        self._length += steps
        tickets, times = deque[LaunchedStep](), []
        for number in range(steps + IN_FLIGHT - 1):
            if number < steps:
                tickets.append(self._worker.launch(plans[number]))
            if number >= IN_FLIGHT - 1:
                with around():
                    self._worker.collect(tickets.popleft())
                times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    def step_seconds(self, steps: int) -> float:
        """The median, after two steps that warm up."""
        return median(self.decode(steps + 2)[2:])

    def graph_seconds(self, steps: int) -> float | None:
        """Of the last step's CUDA graph alone, replayed again and again; None where steps have none."""
        runner = self._worker.runner
        if not isinstance(runner, CudaRunner) or not runner.graphs.replayed:
            return None
        with torch.inference_mode():
            return runner.graphs.repeat(steps)

    def capture_graphs(self) -> GraphReport | None:
        """Capture all CUDA graphs that are missing, without a step; how they stand then. None: there are none."""
        runner = self._worker.runner
        if not isinstance(runner, CudaRunner):
            return None
        while runner.idle():
            pass
        return runner.graphs.report()

    def renew(self) -> None:
        """Forget all rows, and all graphs with them."""
        self._worker.reset()

    def close(self) -> None:
        self._worker.close()
