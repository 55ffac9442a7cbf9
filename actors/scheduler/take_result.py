"""Taking in a step's result: confirm what was computed, append tokens, end what has ended, report."""

from collections.abc import Sequence as Columns
from itertools import chain

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.append_tokens import Gaps, TokenAppender
from troupellm.actors.scheduler.beam_sequences import Beams
from troupellm.actors.scheduler.check_result import Aligned, align, check_logprobs, trim_logprobs
from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.guide_gate import GuideGate
from troupellm.actors.scheduler.open_requests import OpenRequests
from troupellm.actors.scheduler.plans_in_flight import BrokenResult, PlanInFlight
from troupellm.actors.scheduler.proposer_stats import ProposerCounts
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.scheduler.speculation_stats import Drafting
from troupellm.actors.sequences.sequence import Event, Sequence
from troupellm.protocol.messages.graph_report import GraphReport
from troupellm.protocol.messages.metrics import DraftStats, StepStats
from troupellm.protocol.messages.output import StepOutput
from troupellm.protocol.messages.worker import RowLogprobs, RowPooled, StepResult, WorkerReady


class Updates:
    def __init__(
        self,
        open_requests: OpenRequests,
        running_set: RunningSet,
        tables: BlockTables,
        ready: WorkerReady,
        fair_share: FairShare,
        guides: GuideGate | None,
    ) -> None:
        """guides: None where the worker builds guides when it needs them."""
        self._open = open_requests
        self._running_set = running_set
        self._tables = tables
        self._vocab_width = ready.vocab_width
        self._ability = ready.pooling
        self.num_tokens = 0
        """Tokens that were shown."""
        self._stats: list[StepStats] = []
        self._reported = (0, 0, 0)
        self._beams = Beams(open_requests, running_set, tables)
        self.token_appender = TokenAppender(open_requests, running_set, fair_share)
        self.drafting = Drafting()
        self.proposer = ProposerCounts()
        self.graphs: GraphReport | None = None
        self._guides = guides

    def check(self, launched: PlanInFlight, result: StepResult) -> Aligned:
        """A result in the order of its plan, nothing of it taken in yet.

        Raises:
            BrokenResult: no worker in its right mind says this.
        """
        aligned = align(launched, result)
        if not self._valid(aligned):
            raise BrokenResult(f"step {result.step}: a token id is outside 0..{self._vocab_width - 1}")
        if result.logprobs or result.prompt_logprobs:
            check_logprobs(result, self._vocab_width)
        self._check_pooled(launched, result, aligned)
        if aligned.token_counts == launched.expected:
            return aligned
        for index, (expected, count) in enumerate(zip(launched.expected, aligned.token_counts, strict=True)):
            if index in aligned.errors or (not count and launched.sequences[index].sampling.guide is not None):
                continue  # a guide has added tokens in the step before, which this plan did not know of
            if count < expected or (count and not expected):
                raise BrokenResult(f"step {result.step}: a row has {count} tokens instead of {expected}")
        return aligned

    def apply(self, launched: PlanInFlight, result: StepResult, aligned: Aligned, now: float) -> StepOutput:
        """`aligned` as `check` gave it."""
        prompt_logprobs = self._prompt_logprobs(launched, result) if result.prompt_logprobs else ()
        pooled = _alive_pooled(launched, result) if result.pooled else ()
        gaps = self.token_appender.gaps(launched, now)
        self._confirm(launched, aligned, now)
        drafts = self.drafting.note(launched, aligned) if aligned.drafted else None
        rows, counts, tokens = self.token_appender.take(launched, aligned, now)
        logprobs = self._logprobs(launched, result, rows, counts) if result.logprobs else ()
        if launched.has_beams:
            answers = self._beams.take(launched, result, now)
            rows += tuple(answers.rows)
            counts += tuple(map(len, answers.tokens))
            tokens += tuple(chain.from_iterable(answers.tokens))
            logprobs += tuple(answers.logprobs)
        self._end_pooled(launched, pooled)
        for sequence in self.token_appender.take_spent():
            if not sequence.ended:  # a later row of the result may have failed its request
                self._start_over(sequence)
        self._open.release_returned()
        self.num_tokens += len(tokens)
        self._report(launched, result, len(tokens), gaps, now, drafts)
        facts = self._open.take(result.step)
        return StepOutput(
            step=result.step,
            rows=rows,
            token_counts=counts,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            finished=facts.finished if facts else (),
            failed=facts.failed if facts else (),
            closed=facts.closed if facts else (),
        )

    def take_reports(self, result: StepResult) -> None:
        """Take the worker's reports about itself."""
        self.proposer.take(result.proposer)
        self.graphs = result.graphs or self.graphs

    def forget_worker(self) -> None:
        """It was lost."""
        self.proposer.forget()
        self.graphs = None

    def take_stats(self) -> list[StepStats]:
        stats, self._stats = self._stats, []
        return stats

    def _check_pooled(self, launched: PlanInFlight, result: StepResult, aligned: Aligned) -> None:
        """Check that exactly the pooled prompts that end in this plan have vectors; a failed row has none."""
        wanted = {}
        for sequence, _, _, ends in launched.prefills:
            if ends and sequence.pooling is not None and self._ability is not None:
                wanted[sequence.row] = 4 * self._ability.vector_length(sequence.pooling)
        if not (wanted or result.pooled):
            return
        failed = {launched.rows[index] for index in aligned.errors}
        given = {entry.row: len(entry.vector) for entry in result.pooled}
        if len(given) != len(result.pooled) or given != {row: n for row, n in wanted.items() if row not in failed}:
            raise BrokenResult(f"step {result.step}: the pooled vectors are not those of its prompts")

    def _end_pooled(self, launched: PlanInFlight, pooled: tuple[RowPooled, ...]) -> None:
        if not pooled:
            return
        alive = _alive(launched)
        for entry in pooled:
            sequence = alive[entry.row]
            sequence.request.reason = "stop"
            self._open.end(sequence, Event.STOP)

    def _start_over(self, sequence: Sequence) -> None:
        """Its guide was used up: it waits outside of the batch for another one."""
        if self._guides is not None:
            self._guides.rebuild(sequence)
        self._running_set.preempt(sequence)

    def _valid(self, aligned: Aligned) -> bool:
        tokens = aligned.tokens
        return not tokens or (min(tokens) >= 0 and max(tokens) < self._vocab_width)

    def _confirm(self, launched: PlanInFlight, aligned: Aligned, now: float) -> None:
        """Positions of prefills are computed: let others find their full blocks, and siblings start."""
        failed = {launched.rows[index] for index in aligned.errors}
        for sequence, epoch, count, samples in launched.prefills:
            if sequence.epoch != epoch or sequence.row in failed:
                continue
            if not sequence.decoding:
                sequence.num_confirmed_prefill += count
            if not samples or sequence.decoding:
                self._tables.cache_blocks(sequence)
            else:
                self._tables.cache_all_blocks(sequence)
                sequence.decoding = True
                if sequence.request.first_token is None and sequence.pooling is None:
                    sequence.request.first_token = now
                self._open.prompt_computed(sequence)

    def _prompt_logprobs(self, launched: PlanInFlight, result: StepResult) -> tuple[RowLogprobs, ...]:
        """Each prompt position once, also when a preempted sequence computes its prompt again."""
        alive = _alive(launched)
        shown = []
        for entry in result.prompt_logprobs:
            sequence = alive.get(entry.row)
            if sequence is None:
                continue
            trimmed = trim_logprobs(entry, sequence.num_prompt_logprobs, sequence.num_prompt_tokens)
            if trimmed is not None:
                shown.append(trimmed)
                sequence.num_prompt_logprobs = trimmed.position + len(trimmed.ranks) // 4
        return tuple(shown)

    def _logprobs(
        self, launched: PlanInFlight, result: StepResult, rows: Columns[int], counts: Columns[int]
    ) -> tuple[RowLogprobs, ...]:
        """Those of the tokens that are shown."""
        kept = dict(zip(rows, counts, strict=True))
        lengths = {sequence.row: len(sequence.tokens) for sequence in launched.samplers if sequence.row in kept}
        shown = []
        for entry in result.logprobs:
            length = lengths.get(entry.row)
            if length is not None:
                trimmed = trim_logprobs(entry, length - kept[entry.row], length)
                if trimmed is not None:
                    shown.append(trimmed)
        return tuple(shown)

    def _report(
        self,
        launched: PlanInFlight,
        result: StepResult,
        new_tokens: int,
        gaps: Gaps,
        now: float,
        drafts: DraftStats | None,
    ) -> None:
        counted = (
            self._running_set.num_preemptions,
            self._tables.num_queried_tokens,
            self._tables.num_hit_tokens,
        )
        before, self._reported = self._reported, counted
        self._stats.append(
            StepStats(
                num_rows=len(launched.rows),
                prefill_tokens=launched.prefill_tokens,
                decode_tokens=launched.decode_tokens + (0 if drafts is None else drafts.drafted),
                seconds=now - launched.planned_at,
                timings=result.timings,
                new_tokens=new_tokens,
                preemptions=counted[0] - before[0],
                prefix_queries=counted[1] - before[1],
                prefix_hits=counted[2] - before[2],
                inter_token_seconds=gaps,
                drafts=drafts,
            )
        )


def _alive(launched: PlanInFlight) -> dict[int, Sequence]:
    """By row, the sequences of a plan that are still what they were when it was made."""
    planned = zip(launched.sequences, launched.epochs, strict=True)
    return {sequence.row: sequence for sequence, epoch in planned if sequence.epoch == epoch}


def _alive_pooled(launched: PlanInFlight, result: StepResult) -> tuple[RowPooled, ...]:
    alive = _alive(launched)
    return tuple(entry for entry in result.pooled if entry.row in alive)
