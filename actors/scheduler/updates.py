"""Taking in a step's result: confirm what was computed, append tokens, end what has ended, report."""

from collections import Counter
from collections.abc import Sequence as Columns
from itertools import chain

from troupellm.actors.scheduler.beams import Beams
from troupellm.actors.scheduler.block_tables import BlockTables
from troupellm.actors.scheduler.flight import BrokenResult, Flight
from troupellm.actors.scheduler.ledger import Ledger
from troupellm.actors.scheduler.residents import Residents
from troupellm.actors.scheduler.results import Aligned, accept, align, trim_logprobs
from troupellm.actors.scheduler.sequence import NO_EPOCH, Event, Sequence
from troupellm.protocol.metrics import StepStats
from troupellm.protocol.output import RowFinished, StepOutput
from troupellm.protocol.worker import RowLogprobs, RowPooled, StepResult, WorkerReady

Shown = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rows, token counts and tokens, as in `StepOutput`."""
Gaps = tuple[tuple[float, int], ...]
"""Seconds between two tokens of a sequence, and how many sequences had them."""


class _Crowd:
    """Sequences that decode together step after step: what is looked up once for all of them."""

    __slots__ = ("sequences", "steps_left", "stops", "texts", "watched")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.texts = [sequence.tokens for sequence in sequences]
        self.stops: frozenset[int] = frozenset().union(*{sequence.stop_or_eos for sequence in sequences})
        """Tokens that may end one of them."""
        self.steps_left = min((sequence.limit - len(sequence.tokens) for sequence in sequences), default=0)
        """After so many one of them is as long as it may get."""
        self.watched = any(sequence.repetition is not None for sequence in sequences)
        """One of them ends when it repeats itself."""


class Updates:
    def __init__(self, ledger: Ledger, residents: Residents, tables: BlockTables, ready: WorkerReady) -> None:
        self._ledger = ledger
        self._residents = residents
        self._tables = tables
        self._vocab_width = ready.vocab_width
        self._ability = ready.pooling
        self.num_tokens = 0
        """Tokens that were shown."""
        self.num_dropped = 0
        """Row results that named nothing alive."""
        self._stats: list[StepStats] = []
        self._reported = (0, 0, 0)
        self._crowd = _Crowd([])
        self._beams = Beams(ledger, residents, tables)

    def check(self, flight: Flight, result: StepResult) -> Aligned:
        """A result in the order of its plan, nothing of it taken in yet.

        Raises:
            BrokenResult: no worker in its right mind says this.
        """
        aligned = align(flight, result)
        if not self._valid(aligned):
            raise BrokenResult(f"step {result.step}: a token id is outside 0..{self._vocab_width - 1}")
        self._check_pooled(flight, result, aligned)
        if aligned.token_counts == flight.expected:
            return aligned
        for index, (expected, count) in enumerate(zip(flight.expected, aligned.token_counts, strict=True)):
            if index in aligned.errors or (not count and flight.sequences[index].sampling.guide is not None):
                continue  # a guide has added tokens in the step before, which this plan did not know of
            if count < expected or (count and not expected):
                raise BrokenResult(f"step {result.step}: a row has {count} tokens instead of {expected}")
        return aligned

    def apply(self, flight: Flight, result: StepResult, aligned: Aligned, now: float) -> StepOutput:
        """`aligned` as `check` gave it."""
        prompt_logprobs = self._prompt_logprobs(flight, result) if result.prompt_logprobs else ()
        pooled = _alive_pooled(flight, result) if result.pooled else ()
        gaps = _gaps(flight, now)
        self._confirm(flight, aligned, now)
        plain = not aligned.errors and not aligned.finished and aligned.token_counts == flight.expected
        if flight.clean and plain:
            shown = self._accept_plain(flight, aligned.tokens, now)
        else:
            shown = self._accept_odd(flight, aligned, now)
        rows, counts, tokens = shown
        logprobs = self._logprobs(flight, result, rows, counts) if result.logprobs else ()
        if flight.lockstep:
            answers = self._beams.take(flight, result, now)
            rows += tuple(answers.rows)
            counts += tuple(map(len, answers.tokens))
            tokens += tuple(chain.from_iterable(answers.tokens))
            logprobs += tuple(answers.logprobs)
        self._end_pooled(flight, pooled)
        self._ledger.release_returned()
        self.num_tokens += len(tokens)
        self._report(flight, result, len(tokens), gaps, now)
        facts = self._ledger.take(result.step)
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

    def take_stats(self) -> list[StepStats]:
        stats, self._stats = self._stats, []
        return stats

    def _check_pooled(self, flight: Flight, result: StepResult, aligned: Aligned) -> None:
        """Every pooled prompt that ends in this plan has its vector, unless its row failed, and nobody else has one."""
        wanted = {}
        for sequence, _, _, ends in flight.prefills:
            if ends and sequence.pooling is not None and self._ability is not None:
                wanted[sequence.row] = 4 * self._ability.vector_length(sequence.pooling)
        if not (wanted or result.pooled):
            return
        failed = {flight.rows[index] for index in aligned.errors}
        given = {entry.row: len(entry.vector) for entry in result.pooled}
        if len(given) != len(result.pooled) or given != {row: n for row, n in wanted.items() if row not in failed}:
            raise BrokenResult(f"step {result.step}: the pooled vectors are not those of its prompts")

    def _end_pooled(self, flight: Flight, pooled: tuple[RowPooled, ...]) -> None:
        if not pooled:
            return
        alive = _alive(flight)
        for entry in pooled:
            sequence = alive[entry.row]
            sequence.request.reason = "stop"
            self._ledger.end(sequence, Event.STOP)

    def _valid(self, aligned: Aligned) -> bool:
        tokens = aligned.tokens
        return not tokens or (min(tokens) >= 0 and max(tokens) < self._vocab_width)

    def _confirm(self, flight: Flight, aligned: Aligned, now: float) -> None:
        """Positions of prefills are computed: let others find their full blocks, and siblings start."""
        failed = {flight.rows[index] for index in aligned.errors}
        for sequence, epoch, count, samples in flight.prefills:
            if sequence.epoch != epoch or sequence.row in failed:
                continue
            if not sequence.decoding:
                sequence.num_confirmed_prefill += count
            if not samples or sequence.decoding:
                self._tables.label(sequence)
            else:
                self._tables.label_all(sequence)
                sequence.decoding = True
                if sequence.request.first_token is None and sequence.pooling is None:
                    sequence.request.first_token = now
                self._ledger.prompt_computed(sequence)

    def _accept_plain(self, flight: Flight, tokens: tuple[int, ...], now: float) -> Shown:
        """The usual step: every row answered as planned and nothing has ended since."""
        samplers = flight.samplers
        crowd = self._crowd
        if samplers != crowd.sequences:
            crowd = self._crowd = _Crowd(samplers)
        rows = flight.rows if samplers is flight.sequences else tuple([sequence.row for sequence in samplers])
        for known, token in zip(crowd.texts, tokens, strict=True):
            known.append(token)
        for sequence in samplers:
            sequence.last_token_at = now
        crowd.steps_left -= 1
        if crowd.watched or crowd.steps_left <= 0 or not crowd.stops.isdisjoint(tokens):
            self._end_some(samplers, tokens)
        return rows, (1,) * len(rows), tokens

    def _end_some(self, samplers: list[Sequence], tokens: tuple[int, ...]) -> None:
        """Each has one more token, which may be the last one of some."""
        ended = False
        for sequence, token in zip(samplers, tokens, strict=True):
            ends = token in sequence.stop_or_eos or len(sequence.tokens) >= sequence.limit
            if ends or sequence.repetition is not None:
                sequence.tokens.pop()
                _, finished = accept(sequence, (token,))
                if finished is not None:
                    self._finish(sequence, finished)
                    ended = True
        if ended:
            self._crowd = _Crowd([])

    def _accept_odd(self, flight: Flight, aligned: Aligned, now: float) -> Shown:
        """Row by row: ended and preempted sequences, failures, several tokens for a row."""
        self._crowd = _Crowd([])
        rows: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        position = 0
        planned = zip(flight.sequences, flight.epochs, aligned.token_counts, strict=True)
        for index, (sequence, epoch, count) in enumerate(planned):
            span = aligned.tokens[position : position + count]
            position += count
            if sequence.epoch != epoch:
                self.num_dropped += 1
                continue
            error = aligned.errors.get(index)
            if error is not None:
                self._ledger.fail(sequence, error.message, error.code)
            elif count and not sequence.lockstep:
                kept, finished = accept(sequence, span, complete=sequence.row in aligned.finished)
                sequence.last_token_at = now
                rows.append(sequence.row)
                counts.append(kept)
                tokens.extend(span[:kept])
                if finished is not None:
                    self._finish(sequence, finished)
                elif count > 1:
                    _recount(sequence)
        return tuple(rows), tuple(counts), tuple(tokens)

    def _finish(self, sequence: Sequence, finished: RowFinished) -> None:
        sequence.request.reason = finished.reason
        self._ledger.finished.append(finished)
        self._ledger.end(sequence, Event.STOP)

    def _prompt_logprobs(self, flight: Flight, result: StepResult) -> tuple[RowLogprobs, ...]:
        """Each prompt position once, also when a preempted sequence computes its prompt again."""
        alive = _alive(flight)
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
        self, flight: Flight, result: StepResult, rows: Columns[int], counts: Columns[int]
    ) -> tuple[RowLogprobs, ...]:
        """Those of the tokens that are shown."""
        kept = dict(zip(rows, counts, strict=True))
        lengths = {sequence.row: len(sequence.tokens) for sequence in flight.samplers if sequence.row in kept}
        shown = []
        for entry in result.logprobs:
            length = lengths.get(entry.row)
            if length is not None:
                trimmed = trim_logprobs(entry, length - kept[entry.row], length)
                if trimmed is not None:
                    shown.append(trimmed)
        return tuple(shown)

    def _report(self, flight: Flight, result: StepResult, new_tokens: int, gaps: Gaps, now: float) -> None:
        counted = (
            self._residents.num_preemptions,
            self._tables.num_queried_tokens,
            self._tables.num_hit_tokens,
        )
        before, self._reported = self._reported, counted
        self._stats.append(
            StepStats(
                num_rows=len(flight.rows),
                prefill_tokens=flight.prefill_tokens,
                decode_tokens=flight.decode_tokens,
                seconds=now - flight.planned_at,
                timings=result.timings,
                new_tokens=new_tokens,
                preemptions=counted[0] - before[0],
                prefix_queries=counted[1] - before[1],
                prefix_hits=counted[2] - before[2],
                inter_token_seconds=gaps,
            )
        )


def _gaps(flight: Flight, now: float) -> Gaps:
    """How long ago the sequences that sample had their last token; most of a step share one time."""
    if flight.clean:
        times = [sequence.last_token_at for sequence in flight.samplers]
    else:
        times = [sequence.last_token_at for sequence in flight.samplers if sequence.epoch != NO_EPOCH]
    return tuple([(now - time, count) for time, count in Counter(times).items() if time])


def _alive(flight: Flight) -> dict[int, Sequence]:
    """By row, the sequences of a plan that are still what they were when it was made."""
    planned = zip(flight.sequences, flight.epochs, strict=True)
    return {sequence.row: sequence for sequence, epoch in planned if sequence.epoch == epoch}


def _alive_pooled(flight: Flight, result: StepResult) -> tuple[RowPooled, ...]:
    alive = _alive(flight)
    return tuple(entry for entry in result.pooled if entry.row in alive)


def _recount(sequence: Sequence) -> None:
    """After several tokens: what was computed of refused drafts is void, tokens without KV are computed next."""
    known = len(sequence.tokens)
    sequence.num_computed = min(sequence.num_computed, known - 1)
    if sequence.num_computed == known - 1:
        sequence.open_fence()
    else:
        sequence.fence = -1
