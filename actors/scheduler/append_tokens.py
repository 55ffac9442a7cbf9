"""Appending a step's tokens to their sequences, and ending those that have ended."""

from collections import Counter
from itertools import accumulate, chain

from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.open_requests import OpenRequests
from troupellm.actors.scheduler.plans import PLAIN, Aligned, PlanInFlight
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.scheduler.speculative_rows import settle
from troupellm.actors.sequences.sequence import NO_EPOCH, Event, LastToken, Sequence
from troupellm.protocol.errors import GUIDE_SPENT
from troupellm.protocol.messages.output import RowFinished

Shown = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rows, token counts and tokens, as in `StepOutput`."""
Gaps = tuple[tuple[float, int], ...]
"""Seconds between two tokens of a sequence, and how many sequences had them."""


class _PlainRows:
    """Sequences that decode together step after step: what is looked up or written once for all of them."""

    __slots__ = ("last_token", "sequences", "steps_left", "stops", "texts", "watched")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.texts = [sequence.tokens for sequence in sequences]
        self.stops: frozenset[int] = frozenset().union(*{sequence.stop_or_eos for sequence in sequences})
        """Tokens that may end one of them."""
        self.steps_left = min((sequence.limit - len(sequence.tokens) for sequence in sequences), default=0)
        """After so many one of them is as long as it may get."""
        self.watched = any(sequence.repetition is not None for sequence in sequences)
        """One of them ends when it repeats itself."""
        self.last_token = LastToken()
        for sequence in sequences:
            sequence.last_token = self.last_token


class TokenAppender:
    """Three ways to the same end: the usual step, one with accepted drafts, and row by row."""

    def __init__(self, open_requests: OpenRequests, running_set: RunningSet, fair_share: FairShare) -> None:
        self._open = open_requests
        self._running_set = running_set
        self._fair_share = fair_share
        self._plain_rows = _PlainRows([])
        self._spent: list[Sequence] = []
        self.num_dropped = 0
        """Row results that named nothing alive."""

    def take_spent(self) -> list[Sequence]:
        """Sequences whose guide was used up: they start over with a new one."""
        spent, self._spent = self._spent, []
        return spent

    def gaps(self, launched: PlanInFlight, now: float) -> Gaps:
        """How long ago the sequences that sample had their last token; to be asked before `take`."""
        plain_rows = self._plain_rows
        times: dict[float, int]
        if launched.clean and launched.samplers == plain_rows.sequences:
            times = {plain_rows.last_token.at: len(plain_rows.sequences)}
        else:
            times = Counter([each.last_token.at for each in launched.samplers if each.epoch != NO_EPOCH])
        return tuple([(now - time, count) for time, count in times.items() if time and count])

    def take(self, launched: PlanInFlight, aligned: Aligned, now: float) -> Shown:
        """Take the part of a result that is shown to readers. `aligned` is the result of `Updates.check`."""
        whole = launched.clean and not aligned.errors and not aligned.finished
        if whole and aligned.token_counts == launched.expected:
            return self._accept_plain(launched, aligned.tokens, now)
        if whole and launched.limits:
            return self._accept_several(launched, aligned, now)
        return self._accept_odd(launched, aligned, now)

    def _accept_plain(self, launched: PlanInFlight, tokens: tuple[int, ...], now: float) -> Shown:
        """The usual step: every row answered as planned and nothing has ended since."""
        samplers = launched.samplers
        plain_rows = self._plain_rows
        if samplers != plain_rows.sequences:
            plain_rows = self._plain_rows = _PlainRows(samplers)
        rows = launched.rows if samplers is launched.sequences else tuple([sequence.row for sequence in samplers])
        for known, token in zip(plain_rows.texts, tokens, strict=True):
            known.append(token)
        plain_rows.last_token.at = now
        if launched.limits:
            for sequence, limit in zip(launched.sequences, launched.limits, strict=True):
                if limit > 0:
                    sequence.num_lookahead_tokens -= limit
        plain_rows.steps_left -= 1
        if plain_rows.watched or plain_rows.steps_left <= 0 or not plain_rows.stops.isdisjoint(tokens):
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
            self._plain_rows = _PlainRows([])

    def _accept_several(self, launched: PlanInFlight, aligned: Aligned, now: float) -> Shown:
        """Drafts were accepted, and otherwise it is the usual step."""
        counts, tokens, samplers, step = aligned.token_counts, aligned.tokens, launched.samplers, launched.step
        drawn = len(counts) + sum(aligned.accepted)
        if samplers is not launched.sequences or 0 in counts or drawn != len(tokens):
            return self._accept_odd(launched, aligned, now)
        plain_rows = self._plain_rows
        if samplers != plain_rows.sequences:
            plain_rows = self._plain_rows = _PlainRows(samplers)
        plain_rows.last_token.at = now
        careful = plain_rows.watched or not plain_rows.stops.isdisjoint(tokens)
        kept_counts, kept_tokens = list(counts), tokens
        position, cut = 0, False
        for index, (sequence, known, count) in enumerate(zip(samplers, plain_rows.texts, counts, strict=True)):
            span = tokens[position : position + count]
            position += count
            ahead = sequence.last_step > step  # as `settle`, for all that have no tokens without KV but the last one
            sequence.num_computed = len(known) + count - 1 + ahead
            sequence.num_lookahead_tokens = sequence.draft_limit if ahead else 0
            if not careful and len(known) + count < sequence.limit:
                known.extend(span)
                continue
            kept_counts[index], finished = accept(sequence, span)
            if finished is not None:
                cut = True
                self._finish(sequence, finished)
        self._charge(samplers, kept_counts)
        plain_rows.steps_left -= max(counts)
        if cut:
            self._plain_rows = _PlainRows([])
            kept_tokens = _cut(tokens, counts, kept_counts)
        rows = launched.rows
        return rows, tuple(kept_counts), kept_tokens

    def _charge(self, sequences: list[Sequence], counts: list[int]) -> None:
        """For tokens beyond the one that each running sequence is charged for in every step."""
        extra: dict[str, int] = {}
        for sequence, count in zip(sequences, counts, strict=True):
            if count > 1:
                tenant = sequence.request.tenant
                extra[tenant] = extra.get(tenant, 0) + count - 1
        for tenant, tokens in extra.items():
            self._fair_share.charge_generated(tenant, tokens)

    def _accept_odd(self, launched: PlanInFlight, aligned: Aligned, now: float) -> Shown:
        """Row by row: ended and preempted sequences, failures, several tokens for a row."""
        self._plain_rows = _PlainRows([])
        rows: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        position = 0
        alive: list[Sequence] = []
        size = len(launched.rows)
        limits, accepted = launched.limits or (PLAIN,) * size, aligned.accepted or (0,) * size
        planned = zip(
            launched.sequences, launched.epochs, launched.counts, aligned.token_counts, limits, accepted, strict=True
        )
        for index, (sequence, epoch, positions, count, limit, taken) in enumerate(planned):
            span = aligned.tokens[position : position + count]
            position += count
            error = aligned.errors.get(index)
            if sequence.epoch != epoch:
                self.num_dropped += 1
                if error is not None and error.code != GUIDE_SPENT:
                    self._running_set.distrust(sequence)
                continue
            if error is not None and error.code == GUIDE_SPENT and not (sequence.guide_rebuilt or sequence.is_beam):
                sequence.guide_rebuilt = True
                self._spent.append(sequence)
                continue
            if error is not None:
                self._open.fail(sequence, error.message, error.code)
                continue
            if limit != PLAIN:
                settle(sequence, launched.step, limit, count, taken)
            if not count:
                sequence.forced = max(0, sequence.forced - positions - max(limit, 0))
            elif not sequence.is_beam:
                confirmed = len(sequence.tokens) + taken
                kept, finished = accept(sequence, span, complete=sequence.row in aligned.finished)
                sequence.forced = max(0, len(sequence.tokens) - 1 - confirmed)
                sequence.last_token = LastToken(now)
                rows.append(sequence.row)
                counts.append(kept)
                tokens.extend(span[:kept])
                alive.append(sequence)
                if finished is not None:
                    self._finish(sequence, finished)
                    continue
            if count > 1 or (not count and limit != PLAIN):
                _recount(sequence, speculative=limit != PLAIN)
                self._running_set.disturb()
        if launched.limits:
            self._charge(alive, counts)
        return tuple(rows), tuple(counts), tuple(tokens)

    def _finish(self, sequence: Sequence, finished: RowFinished) -> None:
        sequence.request.reason = finished.reason
        self._open.finished.append(finished)
        self._open.end(sequence, Event.STOP)


def accept(sequence: Sequence, tokens: tuple[int, ...], *, complete: bool = False) -> tuple[int, RowFinished | None]:
    """Append tokens up to the one that ends the sequence; how many were kept, and the end if there is one.

    A stop or end token counts from `min_tokens` generated tokens on, and so does a repetition; on the last allowed
    position they win over the limit, and so does a guide that is complete.

    Args:
        complete: nothing can follow the last of the tokens, says the sequence's guide.
    """
    known = sequence.tokens
    for index, token in enumerate(tokens):
        known.append(token)
        if token in sequence.stop_or_eos and sequence.num_generated >= sequence.min_tokens:
            is_eos = token in sequence.eos_token_ids
            return index + 1, RowFinished(sequence.row, "stop", None if is_eos else token, True)
        if complete and index + 1 == len(tokens):
            return index + 1, RowFinished(sequence.row, "stop")
        watch = sequence.repetition
        repeats = watch is not None and watch.follow(known, sequence.num_prompt_tokens)
        if repeats and sequence.num_generated >= sequence.min_tokens:
            return index + 1, RowFinished(sequence.row, "repetition")
        if len(known) >= sequence.limit:
            return index + 1, RowFinished(sequence.row, "length")
    return len(tokens), None


def _cut(tokens: tuple[int, ...], counts: tuple[int, ...], kept: list[int]) -> tuple[int, ...]:
    """The first so many tokens of each row."""
    begins = accumulate(counts, initial=0)
    return tuple(chain.from_iterable(tokens[begin : begin + count] for begin, count in zip(begins, kept, strict=False)))


def _recount(sequence: Sequence, *, speculative: bool) -> None:
    """After several tokens, or none: tokens without KV are computed next. Of a speculative row that is settled
    already."""
    known = len(sequence.tokens)
    if not speculative:
        sequence.num_computed = min(sequence.num_computed, known - 1)
    if sequence.num_computed >= known - 1:
        sequence.reset_no_check()
    else:
        sequence.no_check_until = -1
