"""The runner of encoders: one plan of whole prompts in, one vector per prompt out. Between steps it keeps only the
rows that it knows; it uses no KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from troupellm.models.batch.row_table import PlanError
from troupellm.models.layers.encoder import EncoderBatch, Head, RunnableEncoder
from troupellm.models.runner.pooler import Pooler, pool_whole
from troupellm.protocol.messages.worker import NewRow, StepPlan, StepResult, StepTimings
from troupellm.protocol.params.pooling import PoolingState

BATCH_TOKENS = 1024
"""Tokens that go through the layers together: enough for full speed, few enough that activations stay in the caches."""
LEAST_FILL = 0.6
"""Least ratio of a prompt's length to the longest of its batch: the difference is padding."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Row:
    epoch: int
    token_ids: Ints
    state: PoolingState


class EncoderRunner:
    """Executes plans against one encoder. Calls come from one thread."""

    def __init__(self, encoder: RunnableEncoder, *, max_model_len: int, projection: Head | None = None) -> None:
        self._encoder = encoder
        self._max_len = max_model_len
        self._pooler = Pooler(head=encoder.head, activation=encoder.config.activation, projection=projection)
        self._rows: dict[int, _Row] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Compute one step.

        Args:
            meanwhile: called once, before the model computes.

        Raises:
            PlanError: the plan contradicts what earlier plans said, or asks for a part of a prompt; nothing was
                computed.
        """
        begin = perf_counter()
        rows = self._apply(plan)
        batches = [(members, self._batch([rows[index] for index in members])) for members in group(rows)]
        prepared = perf_counter()
        if meanwhile is not None:
            meanwhile()
        pooled = torch.zeros(len(rows), self._encoder.config.hidden_size, dtype=torch.float32)
        for members, batch in batches:
            hidden = self._encoder.forward(batch)
            counts = [rows[index].token_ids.size for index in members]
            for kind in {rows[index].state.pooling_type for index in members}:
                mine = [place for place, index in enumerate(members) if rows[index].state.pooling_type == kind]
                pooled[[members[place] for place in mine]] = pool_whole(hidden, counts, kind)[mine]
        computed = perf_counter()
        vectors, errors = self._pooler.vectors(plan.rows, [row.state for row in rows], pooled)
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=(0,) * len(rows),
            tokens=(),
            pooled=tuple(vectors),
            errors=tuple(errors),
            timings=StepTimings(
                prepare=prepared - begin, forward=computed - prepared, sample=perf_counter() - computed
            ),
        )

    def _apply(self, plan: StepPlan) -> list[_Row]:
        """Learn of rows and forget others; the plan's rows in its order."""
        if plan.transfers or plan.lookups or plan.copies or plan.forks:
            raise PlanError(f"step {plan.step}: an encoder has no cache to move blocks in")
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            self._add(new)
        found = []
        for row, epoch, start, count in zip(plan.rows, plan.epochs, plan.starts, plan.counts, strict=True):
            known = self._rows.get(row)
            if known is None or known.epoch != epoch:
                raise PlanError(f"row {row} is not known under epoch {epoch}")
            if start or count != known.token_ids.size:
                raise PlanError(f"row {row}: {count} of {known.token_ids.size} tokens; an encoder reads whole prompts")
            found.append(known)
        return found

    def _add(self, new: NewRow) -> None:
        if new.pooling is None or new.embeddings is not None or new.adapter:
            raise PlanError(f"row {new.row}: this worker pools prompts of the base model, and nothing else")
        known = np.frombuffer(new.token_ids, dtype="<i4")
        if not 0 < known.size <= self._max_len:
            raise PlanError(f"row {new.row}: {known.size} tokens, the model takes {self._max_len}")
        older = self._rows.get(new.row)
        if older is not None and new.epoch <= older.epoch:
            raise PlanError(f"row {new.row}: epoch {new.epoch} is not newer than {older.epoch}")
        self._rows[new.row] = _Row(new.epoch, known.astype(np.int32), new.pooling)

    def _batch(self, rows: list[_Row]) -> EncoderBatch:
        config = self._encoder.config
        counts = np.array([row.token_ids.size for row in rows])
        begins = np.cumsum(counts) - counts
        token_ids = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
        along = np.arange(token_ids.size) - np.repeat(begins, counts)
        types = along >= np.repeat([row.state.segment or row.token_ids.size for row in rows], counts)
        positions = along + config.position_offset
        if config.pad_token_id is not None and (token_ids == config.pad_token_id).any():
            positions = _skip_pads(token_ids, begins, counts, config.pad_token_id)
        longest = np.arange(counts.max())
        inside = longest < counts[:, None]
        places = begins[:, None] + np.where(inside, longest, 0)
        return EncoderBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            types=torch.from_numpy(types.astype(np.int64)),
            places=torch.from_numpy(places),
            mask=None if inside.all() else torch.from_numpy(inside),
        )


def group(rows: list[_Row]) -> list[list[int]]:
    """Indices of rows that are computed together: about equally long ones, longest first."""
    found: list[list[int]] = []
    longest = tokens = 0
    for index in sorted(range(len(rows)), key=lambda index: -rows[index].token_ids.size):
        size = rows[index].token_ids.size
        if not found or tokens + size > BATCH_TOKENS or size < LEAST_FILL * longest:
            found.append([])
            longest, tokens = size, 0
        found[-1].append(index)
        tokens += size
    return found


def _skip_pads(token_ids: NDArray[np.int64], begins: Ints, counts: Ints, pad: int) -> NDArray[np.int64]:
    """RoBERTa's rule: a padding token has the padding position, and the other tokens are numbered without it."""
    real = token_ids != pad
    numbers = np.cumsum(real)
    before = np.repeat(numbers[begins] - real[begins], counts)
    return np.where(real, numbers - before, 0) + pad
