"""Our scheduler under the clock: no engine, no event loop, no model."""

import random
import time
from collections.abc import Iterator
from itertools import count
from statistics import median
from typing import Any

import msgspec

from troupellm.actors.kv_cache.block_hash import PrefixHasher, namespace
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.scheduler import SequenceSpec, SubmitRequest
from troupellm.protocol.messages.worker import CacheGroup, SamplingState, StepPlan, StepResult, WorkerReady

VOCAB = 32_000
BLOCK_SIZE = 16
CONTEXT = 1 << 17
SECRET = b"a secret of the benchmark"
SHORT_PROMPT = 64
POOL_BLOCKS = 4096
"""When prompts are admitted: filled by the first few, so that later ones evict."""


class StepCost(msgspec.Struct, frozen=True):
    """Microseconds of CPU per step, medians over windows of the mean step."""

    plan: float
    update: float

    @property
    def total(self) -> float:
        return self.plan + self.update


class AdmissionCost(msgspec.Struct, frozen=True):
    """Microseconds of CPU for one prompt, medians."""

    hashing: float
    """In the input processor, off the scheduler's path."""
    submit: float
    plan: float
    update: float
    """Taking in the result of the prompt's step, where its blocks become findable."""

    @property
    def total(self) -> float:
        """On the scheduler's path."""
        return self.submit + self.plan + self.update


class Drafts(msgspec.Struct, frozen=True):
    """How the scheduler speculates, and what its worker makes of that: any number of the drafts is accepted in turn."""

    limit: int = 0
    """That plans allow each row; 0: rows are speculative and have none."""
    drafted: int = 0

    def config(self, rows: int) -> SpeculativeConfig:
        most = max(self.limit, 1)
        return SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=most,
            num_speculative_tokens_per_batch_size=((1, rows, self.limit),),
        )


class Subject:
    """A scheduler with the prefix cache on, and a worker that answers at once."""

    def __init__(self, *, max_num_seqs: int, max_tokens: int, num_blocks: int, drafts: Drafts | None = None) -> None:
        zeros: dict[str, Any] = dict.fromkeys(
            ("num_parameters", "weight_bytes", "kv_cache_bytes", "activation_bytes", "memory_free_bytes"), 0
        )
        ready = WorkerReady(
            vocab_width=VOCAB,
            max_model_len=CONTEXT,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            groups=(CacheGroup(num_layers=1),),
            dtype="float32",
            device="none",
            architecture="none",
            load_seconds=0.0,
            most_drafts=0 if drafts is None else max(drafts.limit, 1),
            **zeros,
        )
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)
        speculative = None if drafts is None else drafts.config(max_num_seqs)
        self.core = SchedulerCore(config, ready, enable_prefix_caching=True, hash_key=SECRET, speculative=speculative)
        self._drafts = drafts or Drafts()
        self.hasher = PrefixHasher(SECRET, BLOCK_SIZE)
        self._lengths: dict[int, int] = {}
        self._ticks = count()

    def now(self) -> float:
        return next(self._ticks) / 1000.0

    def message(self, number: int, prompt: bytes, max_tokens: int) -> SubmitRequest:
        """A request as the input processor sends it, its block keys included."""
        return SubmitRequest(
            request=number,
            request_id=str(number),
            arrival=0.0,
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=0,
            sequences=(SequenceSpec(row=number, sampling=SamplingState(temperature=0.0)),),
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset({VOCAB - 1}),
            prompt_keys=self.hasher.prompt_keys(namespace(), prompt),
        )

    def answer(self, plan: StepPlan) -> StepResult:
        """A worker's answer: a token for each row that has computed all its tokens."""
        for new in plan.new_rows:
            self._lengths[new.row] = len(new.token_ids) // 4
        ends = zip(plan.rows, plan.starts, plan.counts, strict=True)
        counts = tuple([int(start + planned >= self._lengths[row]) for row, start, planned in ends])
        drafted: tuple[int, ...] = ()
        accepted: tuple[int, ...] = ()
        if plan.draft_limits and self._drafts.drafted:
            drafted = tuple([min(max(limit, 0), self._drafts.drafted) for limit in plan.draft_limits])
            accepted = tuple([min(given, (plan.step + row) % (given + 1)) for row, given in enumerate(drafted)])
            counts = tuple(map(sum, zip(counts, accepted, strict=True)))
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=counts,
            tokens=tuple([(7 * plan.step + index) % (VOCAB - 1) for index in range(sum(counts))]),
            drafted=drafted,
            accepted=accepted,
        )

    def step(self) -> tuple[StepPlan | None, float, float]:
        """One step: its plan, and CPU seconds of plan and update."""
        now = self.now()
        begin = time.thread_time()
        plan = self.core.plan(now)
        planned = time.thread_time() - begin
        if plan is None:
            return None, planned, 0.0
        result, now = self.answer(plan), self.now()
        begin = time.thread_time()
        self.core.update(result, now)
        updated = time.thread_time() - begin
        self.core.take_stats()
        return plan, planned, updated


def prompts(length: int) -> Iterator[bytes]:
    """Different ones, int32."""
    source = random.Random(7)
    while True:
        yield b"".join(source.randrange(VOCAB - 1).to_bytes(4, "little") for _ in range(length))


def step_cost(running: int, window: int, windows: int, drafts: Drafts | None = None) -> StepCost:
    """Decoding at `running` sequences whose lengths differ, so that a 16th of them fill a block in each step."""
    steps = (windows + 1) * window * (1 if drafts is None else 1 + drafts.drafted)
    blocks = running * (3 + (SHORT_PROMPT + steps) // BLOCK_SIZE)
    subject = Subject(max_num_seqs=running, max_tokens=max(8192, running), num_blocks=blocks, drafts=drafts)
    for number in range(running):
        prompt = next(prompts(SHORT_PROMPT + number % BLOCK_SIZE))
        subject.core.submit(subject.message(number, number.to_bytes(4, "little") + prompt[4:], 4 * steps))
    while True:
        plan, _, _ = subject.step()
        if plan is not None and len(plan.rows) == running and max(plan.counts) == 1:
            break
    plans, updates = [], []
    for _ in range(windows):
        costs = [subject.step() for _ in range(window)]
        plans.append(sum(cost for _, cost, _ in costs) / window)
        updates.append(sum(cost for _, _, cost in costs) / window)
    return StepCost(1e6 * median(plans), 1e6 * median(updates))


def admission_cost(length: int, admissions: int, *, cached: bool) -> AdmissionCost:
    """A prompt alone, from its submission to its first token: new ones, or the same one again and again."""
    subject = Subject(max_num_seqs=8, max_tokens=length + 1, num_blocks=max(POOL_BLOCKS, 2 * length // BLOCK_SIZE))
    source = prompts(length)
    same = next(source)
    columns: tuple[list[float], ...] = ([], [], [], [])
    warm = max(2, 1 + POOL_BLOCKS * BLOCK_SIZE // length)
    for number in range(warm + admissions):
        prompt = same if cached else next(source)
        begin = time.thread_time()
        message = subject.message(number, prompt, 1)
        hashed = time.thread_time()
        subject.core.submit(message)
        submitted = time.thread_time()
        plan, planned, updated = subject.step()
        if plan is None or len(plan.rows) != 1 or (plan.counts[0] == 1) != (cached and number > 0):
            raise RuntimeError("the prompt was not admitted as a whole")
        if number >= warm:
            for column, seconds in zip(columns, (hashed - begin, submitted - hashed, planned, updated), strict=True):
                column.append(seconds)
    return AdmissionCost(*(1e6 * median(column) for column in columns))
