"""Speculative decode rows: how many positions each may use in a plan, and how a step's result updates them.

How far such a row comes is known when its plan is back, and the next one is made before. So it is counted twice:
`num_computed` assumes that every plan in flight computes one position, the least there is, and `num_computed +
num_lookahead_tokens` that each computes all that it may. Plans start at the former; blocks cover, and limits bound, the
latter. The worker begins wherever the row is, and what it writes for drafts that are refused is written again later.
"""

from collections.abc import Callable
from functools import partial

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.plan_builder import StepPlanBuilder
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.worker import RowChange, WorkerReady

MakeRoom = Callable[[Sequence, Callable[[], tuple[tuple[int, ...], ...] | None]], tuple[tuple[int, ...], ...] | None]
"""Blocks for a sequence, as its second argument takes them, from others if need be; None when there are none yet."""

PLAIN = -1
"""Limit of a row that computes just its span."""


class SpeculativeRows:
    """Plans speculative rows. A row's *limit* is how many positions beyond one it may compute, its *width* one more."""

    def __init__(self, config: SpeculativeConfig, most: int, scheduler: SchedulerConfig, tables: BlockTables) -> None:
        """most: drafts of a row in one step that the worker verifies."""
        self._config = config
        self._tables = tables
        self._chunked = scheduler.enable_chunked_prefill
        # Groups with a window have room for what one step computes: two plans together must not want more.
        self.most = min(most, (scheduler.max_num_batched_tokens - 1) // 2)
        self._wanted: dict[int, int] = {}
        """Drafts of each row that the settings allow, by the rows of a step."""
        self._limit = 0
        """Of most rows in the newest plan."""
        self._crowded = False
        """A sequence had more to compute in the newest plan than one position and drafts."""

    def limit(self, num_rows: int, budget: int, *, crowded: bool) -> int:
        """Of each row in a step of so many. Every row has its one position before any has more, and prompts that wait
        have half of what is left, or all of it where they must be computed at once."""
        if not num_rows:
            return 0
        wanted = self._wanted.get(num_rows)
        if wanted is None:
            wanted = self._wanted[num_rows] = min(self.most, self._config.most_drafts_at(num_rows))
        spare = budget - num_rows
        if crowded or self._crowded:
            spare = spare // 2 if self._chunked else 0
        # The usual case first, in few words: this is called in every step.
        return wanted if wanted * num_rows <= spare else max(0, spare // num_rows)

    def plan(self, builder: StepPlanBuilder, turn: list[Sequence], step: int, *, crowded: bool) -> list[Sequence]:
        """Plan every sequence that has all its known tokens computed or planned, as far as free blocks go; the others.

        Columns of `builder` are begun with them.
        """
        limit = self._limit = self.limit(len(turn), builder.budget, crowded=crowded)
        width, twice = 1 + limit, 2 + 2 * limit
        starts: list[int] = []
        odd: list[int] = []
        for sequence in turn:
            start = sequence.num_computed
            reserved = start + sequence.num_lookahead_tokens
            if reserved + width <= sequence.no_check_until and reserved + twice <= sequence.limit:
                sequence.num_computed = start + 1
                sequence.num_lookahead_tokens += limit
                sequence.draft_limit = limit
                sequence.last_step = step
            else:
                odd.append(len(starts))
            starts.append(start)
        limits = [limit] * len(starts)
        others: list[Sequence] = []
        self._crowded = False
        if odd:
            others = self._fit_odd(builder, turn, odd, limits, step)
        if others:
            self._crowded = any(sequence.no_check_until < 0 or not self.takes(sequence) for sequence in others)
            kept = [index for index, fitted in enumerate(limits) if fitted != PLAIN]
            turn, starts = [turn[index] for index in kept], [starts[index] for index in kept]
            limits = [limits[index] for index in kept]
        builder.sequences, builder.starts, builder.limits = turn, starts, limits
        builder.counts = [1] * len(starts)
        builder.expected = builder.counts.copy()
        builder.budget -= len(limits) + sum(limits)
        return others

    def _fit_odd(
        self, builder: StepPlanBuilder, turn: list[Sequence], odd: list[int], limits: list[int], step: int
    ) -> list[Sequence]:
        """Plan those for which not all is at hand, as far as that goes; the others, whose limits are PLAIN."""
        width, others = 1 + self._limit, []
        for index in odd:
            limits[index] = fitted = self._fit(builder, turn[index], width) - 1
            if fitted == PLAIN:
                others.append(turn[index])
            else:
                _advance(turn[index], fitted, step)
        return others

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence's next positions are its worker's choice: it generates, and no span of its prompt is left.

        Beams are not: the host chooses their tokens.
        """
        if sequence.is_beam or sequence.pooling is not None:
            return False
        return sequence.decoding or sequence.num_computed >= len(sequence.tokens)

    def plan_one(self, builder: StepPlanBuilder, sequence: Sequence, step: int, make_room: MakeRoom) -> bool:
        """Plan a row that `plan` left out: it needs blocks of others, or has several tokens that a guide forced to
        compute, which takes as many positions. False if budget or blocks were missing.
        """
        start, reserved = sequence.num_computed, sequence.num_computed + sequence.num_lookahead_tokens
        room = sequence.limit - 1 - reserved
        if room < 1:
            return True  # plans in flight may end it
        forced = min(self.most, len(sequence.tokens) - start - 1)
        width = min(max(min(1 + self._limit, _half(room)), 1 + forced), room, builder.budget)
        if width < 1:
            return False
        if reserved + width > sequence.capacity:
            added = self._tables.grow(sequence, reserved + width)
            if added is None:  # no sequence is preempted for a draft
                width = max(1, sequence.capacity - reserved)
                if reserved + width > sequence.capacity:
                    added = make_room(sequence, partial(self._tables.grow, sequence, reserved + width))
                    if added is None:
                        return False
            if added is not None:
                builder.changes.append(RowChange(row=sequence.row, appended_blocks=added))
        builder.launched.clean = False  # the worker may compute several tokens before it draws one
        builder.sequences.append(sequence)
        builder.starts.append(start)
        builder.limits.append(width - 1)
        builder.counts.append(1)
        builder.expected.append(1)
        builder.budget -= width
        _advance(sequence, width - 1, step)
        sequence.reset_no_check()
        return True

    def _fit(self, builder: StepPlanBuilder, sequence: Sequence, width: int) -> int:
        """As much of `width` as the row's end and free blocks allow; 0 where that is nothing, or it is not its turn."""
        reserved = sequence.num_computed + sequence.num_lookahead_tokens
        width = min(width, _half(sequence.limit - 1 - reserved))
        if sequence.no_check_until < 0 or width < 1:
            return 0
        if reserved + width > sequence.capacity:
            added = self._tables.grow(sequence, reserved + width)
            if added is None:
                return max(0, sequence.capacity - reserved)
            builder.changes.append(RowChange(row=sequence.row, appended_blocks=added))
            sequence.reset_no_check()
        return width


def make_speculative_rows(
    config: SpeculativeConfig | None, ready: WorkerReady, scheduler: SchedulerConfig, tables: BlockTables
) -> SpeculativeRows | None:
    """None where nothing is drafted, or the worker verifies nothing: then every row is plain."""
    if config is None or not ready.most_drafts:
        return None
    return SpeculativeRows(config, min(config.most_drafts, ready.most_drafts), scheduler, tables)


def _half(room: int) -> int:
    """Of what is left of a row up to its end, so that the next plan can name it, too: drafts seldom come so far."""
    return (room + 1) // 2


def _advance(sequence: Sequence, limit: int, step: int) -> None:
    """A plan names the row, with that limit."""
    sequence.num_computed += 1
    sequence.num_lookahead_tokens += limit
    sequence.draft_limit = limit
    sequence.last_step = step


def settle(sequence: Sequence, step: int, limit: int, count: int, accepted: int) -> None:
    """A plan came back: where the row is now, before its `count` new tokens are appended.

    Args:
        step: the plan's.
        limit: of the row in it.
        accepted: drafts among the tokens; behind them come one that was drawn and those that a guide forced.
    """
    if not count:  # it had more tokens to compute than it was allowed positions
        sequence.num_computed += limit
        sequence.num_lookahead_tokens -= limit
        return
    ahead = sequence.last_step > step  # of two plans in flight, one more
    sequence.num_computed = len(sequence.tokens) + accepted + ahead
    sequence.num_lookahead_tokens = sequence.draft_limit if ahead else 0
