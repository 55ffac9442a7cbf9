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
        self._open_requests = open_requests
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

    def check(self, plan_in_flight: PlanInFlight, result: StepResult) -> Aligned:
        """A result in the order of its plan, nothing of it taken in yet.

        Raises:
            BrokenResult: no worker in its right mind says this.
        """
        aligned = align(plan_in_flight, result)
        if not self._valid(aligned):
            raise BrokenResult(f"step {result.step}: a token id is outside 0..{self._vocab_width - 1}")
        if result.logprobs or result.prompt_logprobs:
            check_logprobs(result, self._vocab_width)
        self._check_pooled(plan_in_flight, result, aligned)
        if aligned.token_counts == plan_in_flight.expected:
            return aligned
        for index, (expected, count) in enumerate(zip(plan_in_flight.expected, aligned.token_counts, strict=True)):
            if index in aligned.errors or (not count and plan_in_flight.sequences[index].sampling.guide is not None):
                continue  # a guide has added tokens in the step before, which this plan did not know of
            if count < expected or (count and not expected):
                raise BrokenResult(f"step {result.step}: a row has {count} tokens instead of {expected}")
        return aligned

    def apply(self, plan_in_flight: PlanInFlight, result: StepResult, aligned: Aligned, now: float) -> StepOutput:
        """`aligned` as `check` gave it."""
        prompt_logprobs = self._prompt_logprobs(plan_in_flight, result) if result.prompt_logprobs else ()
        pooled = _alive_pooled(plan_in_flight, result) if result.pooled else ()
        gaps = self.token_appender.gaps(plan_in_flight, now)
        self._confirm(plan_in_flight, aligned, now)
        drafts = self.drafting.note(plan_in_flight, aligned) if aligned.drafted else None
        rows, counts, tokens = self.token_appender.take(plan_in_flight, aligned, now)
        logprobs = self._logprobs(plan_in_flight, result, rows, counts) if result.logprobs else ()
        if plan_in_flight.has_beams:
            answers = self._beams.take(plan_in_flight, result, now)
            rows += tuple(answers.rows)
            counts += tuple(map(len, answers.tokens))
            tokens += tuple(chain.from_iterable(answers.tokens))
            logprobs += tuple(answers.logprobs)
        self._end_pooled(plan_in_flight, pooled)
        for sequence in self.token_appender.take_spent():
            if not sequence.ended:  # a later row of the result may have failed its request
                self._start_over(sequence)
        self._open_requests.release_returned()
        self.num_tokens += len(tokens)
        self._report(plan_in_flight, result, len(tokens), gaps, now, drafts)
        facts = self._open_requests.take(result.step)
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

    def _check_pooled(self, plan_in_flight: PlanInFlight, result: StepResult, aligned: Aligned) -> None:
        """Check that exactly the pooled prompts that end in this plan have vectors; a failed row has none."""
        wanted = {}
        for sequence, _, _, ends in plan_in_flight.prefills:
            if ends and sequence.pooling is not None and self._ability is not None:
                wanted[sequence.row] = 4 * self._ability.vector_length(sequence.pooling)
        if not (wanted or result.pooled):
            return
        failed = {plan_in_flight.rows[index] for index in aligned.errors}
        given = {entry.row: len(entry.vector) for entry in result.pooled}
        if len(given) != len(result.pooled) or given != {row: n for row, n in wanted.items() if row not in failed}:
            raise BrokenResult(f"step {result.step}: the pooled vectors are not those of its prompts")

    def _end_pooled(self, plan_in_flight: PlanInFlight, pooled: tuple[RowPooled, ...]) -> None:
        if not pooled:
            return
        alive = _alive(plan_in_flight)
        for entry in pooled:
            sequence = alive[entry.row]
            sequence.request.reason = "stop"
            self._open_requests.end(sequence, Event.STOP)

    def _start_over(self, sequence: Sequence) -> None:
        """Its guide was used up: it waits outside of the batch for another one."""
        if self._guides is not None:
            self._guides.rebuild(sequence)
        self._running_set.preempt(sequence)

    def _valid(self, aligned: Aligned) -> bool:
        tokens = aligned.tokens
        return not tokens or (min(tokens) >= 0 and max(tokens) < self._vocab_width)

    def _confirm(self, plan_in_flight: PlanInFlight, aligned: Aligned, now: float) -> None:
        """Positions of prefills are computed: let others find their full blocks, and siblings start."""
        failed = {plan_in_flight.rows[index] for index in aligned.errors}
        for sequence, epoch, count, samples in plan_in_flight.prefills:
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
                self._open_requests.prompt_computed(sequence)

    def _prompt_logprobs(self, plan_in_flight: PlanInFlight, result: StepResult) -> tuple[RowLogprobs, ...]:
        """Each prompt position once, also when a preempted sequence computes its prompt again."""
        alive = _alive(plan_in_flight)
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
        self, plan_in_flight: PlanInFlight, result: StepResult, rows: Columns[int], counts: Columns[int]
    ) -> tuple[RowLogprobs, ...]:
        """Those of the tokens that are shown."""
        kept = dict(zip(rows, counts, strict=True))
        lengths = {sequence.row: len(sequence.tokens) for sequence in plan_in_flight.samplers if sequence.row in kept}
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
        plan_in_flight: PlanInFlight,
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
                num_rows=len(plan_in_flight.rows),
                prefill_tokens=plan_in_flight.prefill_tokens,
                decode_tokens=plan_in_flight.decode_tokens + (0 if drafts is None else drafts.drafted),
                seconds=now - plan_in_flight.planned_at,
                timings=result.timings,
                new_tokens=new_tokens,
                preemptions=counted[0] - before[0],
                prefix_queries=counted[1] - before[1],
                prefix_hits=counted[2] - before[2],
                inter_token_seconds=gaps,
                drafts=drafts,
            )
        )


def _alive(plan_in_flight: PlanInFlight) -> dict[int, Sequence]:
    """By row, the sequences of a plan that are still what they were when it was made."""
    planned = zip(plan_in_flight.sequences, plan_in_flight.epochs, strict=True)
    return {sequence.row: sequence for sequence, epoch in planned if sequence.epoch == epoch}


def _alive_pooled(plan_in_flight: PlanInFlight, result: StepResult) -> tuple[RowPooled, ...]:
    alive = _alive(plan_in_flight)
    return tuple(entry for entry in result.pooled if entry.row in alive)
