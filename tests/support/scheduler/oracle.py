"""A worker that answers at once, and a reader that keeps score.

The oracle's next token is a hash of everything before it, so the right stream of a prompt is known beforehand. The
worker rebuilds each row from what plans and its own results say, the way a real one must, and refuses a plan that a
real one could not execute: spans that leave gaps, tables that do not cover them, blocks that hold something else.
"""

import struct
from collections import deque
from dataclasses import dataclass, field

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.messages.output import StepOutput
from troupellm.protocol.messages.scheduler import BeamSettings, SequenceSpec, SubmitRequest, WorkerLost
from troupellm.protocol.messages.worker import (
    CacheGroup,
    NewRow,
    RowError,
    RowLogprobs,
    RowPooled,
    SamplingState,
    StepPlan,
    StepResult,
    WorkerReady,
)
from troupellm.protocol.params.pooling import PoolingState
from troupellm.tests.support.scheduler.held_states import HeldStates
from troupellm.tests.support.scheduler.plain_beams import VOCAB, candidates, next_token, vector_of
from troupellm.tests.support.scheduler.reader import Reader

EOS = 0
SECRET = b"a secret of the tests"


def stream_of(prompt: list[int], fork: int, max_tokens: int, stops: frozenset[int], min_tokens: int = 0) -> list[int]:
    """The generated tokens of a sequence, its stop token included."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, fork))
        if tokens[-1] in stops and len(tokens) - len(prompt) >= min_tokens:
            break
    return tokens[len(prompt) :]


def ready(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    groups: int = 1,
    windows: tuple[int | None, ...] = (),
    **fields: int,
) -> WorkerReady:
    """
    Args:
        num_blocks: per group; they are in one pool.
        groups: that keep everything; `windows` says instead what each group keeps.
        fields: of `WorkerReady`, such as `most_drafts`.
    """
    windows = windows or (None,) * groups
    return WorkerReady(
        vocab_width=VOCAB,
        max_model_len=max_model_len,
        num_blocks=num_blocks * len(windows),
        block_size=block_size,
        groups=tuple(CacheGroup(num_layers=1, sliding_window=window) for window in windows),
        dtype="float32",
        device="cpu",
        architecture="Oracle",
        num_parameters=0,
        weight_bytes=0,
        kv_cache_bytes=0,
        activation_bytes=0,
        memory_free_bytes=0,
        load_seconds=0.0,
        **fields,
    )


def make_core(
    settings: WorkerReady | None = None, *, caching: bool = True, key: bytes = SECRET, **config: object
) -> SchedulerCore:
    config = {"max_plans_in_flight": 1} | config  # what a step decides is plain where the next one waits for it
    return SchedulerCore(SchedulerConfig(**config), settings or ready(), enable_prefix_caching=caching, hash_key=key)


def submission(request: int, prompt: list[int], rows: int = 1, **fields: object) -> SubmitRequest:
    """A request whose rows are numbered 100 * request + index."""
    sampling = fields.pop("sampling", SamplingState())
    defaults: dict[str, object] = {
        "arrival": 0.0,
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": frozenset(),
        "eos_token_ids": frozenset(),
    }
    specs = tuple(
        SequenceSpec(row=100 * request + fork, sampling=SamplingState(**{**_fields(sampling), "fork": fork}))
        for fork in range(rows)
    )
    return SubmitRequest(
        request=request,
        request_id=f"request-{request}",
        prompt=struct.pack(f"<{len(prompt)}i", *prompt),
        sequences=specs,
        **{**defaults, **fields},
    )


def beam_submission(request: int, prompt: list[int], rows: int, **fields: object) -> SubmitRequest:
    """A beam search; `length_penalty` and `early_stopping` may be given."""
    given = {name: fields.pop(name) for name in ("length_penalty", "early_stopping") if name in fields}
    stops = fields.get("eos_token_ids", frozenset()) | fields.get("stop_token_ids", frozenset())
    beam = BeamSettings(num_candidates=max(2 * rows, rows + len(stops)), **given)
    sampling = SamplingState(temperature=0.0, logprobs=beam.num_candidates)
    return submission(request, prompt, rows=rows, beam=beam, sampling=sampling, **fields)


def _fields(sampling: object) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in SamplingState.__struct_fields__}


@dataclass
class _Row:
    epoch: int
    sampling: SamplingState
    tokens: list[int]
    num_computed: int
    tables: list[list[int]]
    pooling: PoolingState | None
    state: int


@dataclass
class Oracle:
    """The worker: `launch` computes at once, `collect` gives the results in order."""

    block_size: int
    num_blocks: int
    windows: tuple[int | None, ...] = (None, None)
    burst: int = 1
    """Tokens per sampling row, as if so many drafts had been accepted; the known ones are computed later."""
    broken_rows: set[int] = field(default_factory=set)
    failure: tuple[str, ...] = ("logits are NaN",)
    """Message and code of the errors of `broken_rows`, which fail when they are computed next."""
    rows: dict[int, _Row] = field(default_factory=dict)
    content: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Position in the cache -> whose group's KV is there, and all tokens up to the one that it is of."""
    states: HeldStates = field(default_factory=HeldStates)
    pending: deque[StepResult] = field(default_factory=deque)
    num_computed: int = 0

    def launch(self, plan: StepPlan) -> None:
        assert len(set(plan.rows)) == len(plan.rows), "a row is planned twice"
        for row in plan.freed_rows:
            del self.rows[row]
        self._copy(plan)
        self.states.copy(plan)
        new = {row.row for row in plan.new_rows}
        for new_row in plan.new_rows:
            self._add(new_row, plan.starts[plan.rows.index(new_row.row)])
        self._fork(plan)
        for change in plan.changes:
            assert change.row not in new, "a new row is changed in the plan that brings it"
            for table, added in zip(self.rows[change.row].tables, change.appended_blocks, strict=True):
                del table[len(table) - change.dropped_blocks :]
                table.extend(added)
        counts: list[int] = []
        tokens: list[int] = []
        errors: list[RowError] = []
        logprobs: list[RowLogprobs] = []
        pooled: list[RowPooled] = []
        limits = plan.draft_limits or (-1,) * len(plan.rows)
        drafts: list[tuple[int, int]] = []
        columns = zip(plan.rows, plan.epochs, plan.starts, plan.counts, limits, strict=True)
        for row, epoch, start, count, limit in columns:
            if limit < 0:
                sampled, of_row = self._compute(row, epoch, start, count), (0, 0)
            else:
                sampled, of_row = self._verify(row, epoch, start, limit)
            drafts.append((0, 0) if row in self.broken_rows else of_row)
            if row in self.broken_rows:
                self.broken_rows.remove(row)
                errors.append(RowError(row, *self.failure))
                sampled = []
            elif (state := self.rows[row]).pooling is not None and state.num_computed == len(state.tokens):
                pooled.append(RowPooled(row, vector_of(state.tokens)))
            elif sampled and self.rows[row].sampling.logprobs >= 0:
                logprobs.append(self._describe(row, len(sampled)))
            counts.append(len(sampled))
            tokens.extend(sampled)
        self.pending.append(
            StepResult(
                step=plan.step,
                engine_epoch=plan.engine_epoch,
                rows=plan.rows,
                epochs=plan.epochs,
                token_counts=tuple(counts),
                tokens=tuple(tokens),
                drafted=tuple(drafted for drafted, _ in drafts) if any(map(any, drafts)) else (),
                accepted=tuple(accepted for _, accepted in drafts) if any(map(any, drafts)) else (),
                errors=tuple(errors),
                logprobs=tuple(logprobs),
                pooled=tuple(pooled),
            )
        )

    def collect(self) -> StepResult:
        return self.pending.popleft()

    def reset(self) -> None:
        """As a new worker has it: no rows, nothing in the cache, nothing under way."""
        self.rows.clear()
        self.content.clear()
        self.states = HeldStates()
        self.pending.clear()

    def _add(self, new: NewRow, start: int) -> None:
        known = self.rows.get(new.row)
        assert known is None or known.epoch < new.epoch, "a row that is known comes again"
        tokens = list(struct.unpack(f"<{len(new.token_ids) // 4}i", new.token_ids))
        tables = [list(blocks) for blocks in new.blocks]
        self.rows[new.row] = _Row(new.epoch, new.sampling, tokens, start, tables, new.pooling, new.state)
        assert start < len(tokens), "nothing is left to compute"
        for group, table in enumerate(tables):
            for position in range(self._first_seen(group, start), start):
                held = self.content.get(self._slot(table, position))
                assert held == (group, tuple(tokens[: position + 1])), "a cached block holds something else"

    def _fork(self, plan: StepPlan) -> None:
        """Every parent is read before any row is changed."""
        parents = [self.rows[fork.parent] for fork in plan.forks]
        read = [(parent.tokens[:], parent.num_computed, [table[:] for table in parent.tables]) for parent in parents]
        for fork, (tokens, num_computed, tables) in zip(plan.forks, read, strict=True):
            assert num_computed == fork.num_tokens <= len(tokens), "a fork of what is not computed"
            row = self.rows[fork.row]
            row.tokens, row.num_computed, row.tables = [*tokens[: fork.num_tokens], fork.token_id], num_computed, tables

    def _describe(self, row: int, count: int) -> RowLogprobs:
        """Of the tokens that were just sampled, the likeliest ones."""
        state = self.rows[row]
        first = len(state.tokens) - count
        entries: list[tuple[float, int]] = []
        for position in range(first, len(state.tokens)):
            top = candidates(state.tokens[:position])[: state.sampling.logprobs]
            entries += [top[0], *top]
        return RowLogprobs(
            row=row,
            position=first,
            width=len(entries) // count,
            token_ids=struct.pack(f"<{len(entries)}i", *(token for _, token in entries)),
            logprobs=struct.pack(f"<{len(entries)}f", *(logprob for logprob, _ in entries)),
            ranks=struct.pack(f"<{count}i", *(1,) * count),
        )

    def _copy(self, plan: StepPlan) -> None:
        """Every source is read before any target is written."""
        size = self.block_size
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies go to one block"
        held = [[self.content.get(copy.source * size + place) for place in range(size)] for copy in plan.copies]
        for copy, contents in zip(plan.copies, held, strict=True):
            for place, content in enumerate(contents):
                if content is not None:
                    self.content[copy.target * size + place] = content

    def _first_seen(self, group: int, start: int) -> int:
        """Of what lies before a span, the first position that its first token sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, start + 1 - window)

    def _slot(self, table: list[int], position: int) -> int:
        assert position // self.block_size < len(table), "the block table does not cover a position"
        block = table[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block * self.block_size + position % self.block_size

    def _compute(self, row: int, epoch: int, start: int, count: int) -> list[int]:
        state = self.rows[row]
        assert state.epoch == epoch, "a row is planned under an epoch that the worker does not know"
        assert start == state.num_computed, "a span leaves a gap or overlaps"
        assert 0 < count <= len(state.tokens) - start, "a span goes beyond the known tokens"
        self.states.compute(state.state, state.tokens, start, start + count)
        state.num_computed = start + count
        self.num_computed += count
        for group, table in enumerate(state.tables):
            for position in range(start, start + count):
                self.content[self._slot(table, position)] = (group, tuple(state.tokens[: position + 1]))
        for group, table in enumerate(state.tables):
            for position in range(self._first_seen(group, start), start):
                held = self.content[self._slot(table, position)]
                assert held == (group, tuple(state.tokens[: position + 1])), "somebody wrote into this row's blocks"
        if state.num_computed < len(state.tokens) or state.pooling is not None:
            return []
        return self._draw(state, 1 if state.sampling.logprobs >= 0 else self.burst)

    def _draw(self, state: _Row, count: int) -> list[int]:
        """The next tokens of a row, which has them then."""
        for _ in range(count):
            greedy = state.sampling.logprobs >= 0
            token = candidates(state.tokens)[0][1] if greedy else next_token(state.tokens, state.sampling.fork)
            state.tokens.append(token)
        return state.tokens[len(state.tokens) - count :]

    def _verify(self, row: int, epoch: int, start: int, limit: int) -> tuple[list[int], tuple[int, int]]:
        """See `DraftingOracle`."""
        raise AssertionError("a row is speculative, and this worker verifies no drafts")


class Harness:
    """Core, oracle and reader; checks the invariants after every call, if not told that its user does."""

    def __init__(
        self,
        core: SchedulerCore,
        settings: WorkerReady | None = None,
        *,
        worker: type[Oracle] = Oracle,
        checks_every_call: bool = True,
        **oracle: object,
    ) -> None:
        self._check = core.assert_invariants if checks_every_call else lambda: None
        settings = self.settings = settings or ready()
        self.core = core
        windows = tuple(group.sliding_window for group in settings.groups)
        self.oracle = worker(settings.block_size, settings.num_blocks, windows, **oracle)
        self.reader = Reader()
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.outputs: list[StepOutput] = []

    def plan(self) -> StepPlan | None:
        self.now += 1.0
        plan = self.core.plan(self.now)
        self._check()
        if plan is not None:
            self.plans.append(plan)
            self.oracle.launch(plan)
        self._drain()
        return plan

    def finish(self) -> StepOutput:
        self.now += 1.0
        output = self.core.update(self.oracle.collect(), self.now)
        self._check()
        self.reader.read(output)
        self.outputs.append(output)
        return output

    def step(self) -> bool:
        """Fill the credits, then let the oldest plan come back; False when there is nothing to do."""
        while self.plan() is not None:
            pass
        if not self.oracle.pending:
            return False
        self.finish()
        return True

    def run(self, most: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"still busy after {most} steps")

    def lose(self, reason: str = "it died", *, fault: bool = True, exhausted: bool = False) -> None:
        """The worker dies with everything it holds, and another one comes."""
        self.oracle.reset()
        self.core.lose_worker(WorkerLost(reason, fault, exhausted))
        self._check()
        self._drain()
        assert self.core.plan(self.now) is None, "a plan for a worker that is not there"
        self.core.worker_restarted(self.settings)
        self._check()
        self._drain()

    def submit(self, message: SubmitRequest) -> None:
        self.core.submit(message)
        self._check()
        self._drain()

    def abort(self, request: int) -> None:
        over = request in self.reader.closed
        self.core.abort(request)
        self._check()
        if over:  # the output actor ignores it
            output = self.core.take_output()
            assert output is None or [closed.request for closed in output.closed] == [request], (
                "a late abort says something else"
            )
        self._drain()

    def _drain(self) -> None:
        self.reader.read(self.core.take_output())

    def assert_idle(self) -> None:
        snapshot = self.core.snapshot()
        assert (snapshot.waiting, snapshot.running, snapshot.paused, snapshot.plans_in_flight) == (0, 0, 0, 0)
        assert snapshot.blocks_used == 0
        assert snapshot.waiting_tokens == 0
