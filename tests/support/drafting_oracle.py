"""The oracle that verifies drafts, and whose guides force tokens: how many, a seed decides.

A refused draft leaves rubbish where its position lies, as it does in a real cache; reading it before it is written
again is an error.
"""

import random
from dataclasses import dataclass, field

from oracle import SECRET, Harness, Oracle, ready

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.worker import SamplingState, StepPlan, WorkerReady
from troupellm.protocol.params.guide import GuideProgram

GUIDED = SamplingState(guide=GuideProgram(backend="none", text=""))
"""A row whose tokens are sometimes forced."""
MOST_FORCED = 6


@dataclass
class DraftingOracle(Oracle):
    seed: int = 0
    hit_rate: float = 0.7
    """How likely each draft is to be accepted."""
    max_tokens: int = 1 << 30
    """Positions that a plan may have computed."""
    drafted: int = 0
    accepted: int = 0
    rubbish: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def launch(self, plan: StepPlan) -> None:
        limits = plan.draft_limits or (-1,) * len(plan.rows)
        assert len(limits) == len(plan.rows), "limits are not parallel to rows"
        counts = [max(limit, 0) + count for limit, count in zip(limits, plan.counts, strict=True)]
        assert sum(counts) <= self.max_tokens, "a plan may exceed the tokens of a step"
        assert all(count == 1 for count, limit in zip(plan.counts, limits, strict=True) if limit >= 0)
        super().launch(plan)

    def _compute(self, row: int, epoch: int, start: int, count: int) -> list[int]:
        sampled = super()._compute(row, epoch, start, count)
        return sampled + self._force(row) if sampled else sampled

    def _verify(self, row: int, epoch: int, start: int, limit: int) -> tuple[list[int], tuple[int, int]]:
        state = self.rows[row]
        assert state.pooling is None, "a pooled row is speculative"
        assert start <= state.num_computed, "the lower bound of a row's start is too high"
        first, known = state.num_computed, len(state.tokens)
        if known - first > limit + 1:
            super()._compute(row, epoch, first, limit + 1)
            return [], (0, 0)
        room = limit + 1 - (known - first)
        drafted = self._random.randint(0, room)
        hits = 0
        while hits < drafted and self._random.random() < self.hit_rate:
            hits += 1
        for table in state.tables:
            for position in range(known + hits, known + drafted):
                self.rubbish += 1
                self.content[self._slot(table, position)] = (-1, (self.rubbish,))
        sampled = self._draw(state, hits)
        burst, self.burst = self.burst, 1
        sampled += super()._compute(row, epoch, first, known + hits - first)
        self.burst = burst
        self.drafted += drafted
        self.accepted += hits
        return sampled + self._force(row), (drafted, hits)

    def _force(self, row: int) -> list[int]:
        """Tokens that a guide adds without a draw; the stream is the same, so they are its next ones."""
        state = self.rows[row]
        if state.sampling.guide is None or self._random.random() < 0.6:
            return []
        return self._draw(state, self._random.randint(1, MOST_FORCED))


def drafting_harness(
    settings: WorkerReady | None = None,
    *,
    drafts: int = 4,
    schedule: tuple[tuple[int, int, int], ...] = (),
    caching: bool = True,
    seed: int = 0,
    hit_rate: float = 0.7,
    **config: object,
) -> Harness:
    """A scheduler that speculates, and its worker.

    Args:
        config: of the scheduler.
    """
    settings = settings or ready(most_drafts=drafts)
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        num_speculative_tokens_per_batch_size=tuple((first, last, min(k, drafts)) for first, last, k in schedule),
    )
    scheduler = SchedulerConfig(**config)
    core = SchedulerCore(scheduler, settings, enable_prefix_caching=caching, hash_key=SECRET, speculative=speculative)
    most = scheduler.max_num_batched_tokens
    return Harness(core, settings, worker=DraftingOracle, seed=seed, hit_rate=hit_rate, max_tokens=most)
