"""Appending a step's tokens to their sequences, and ending those that have ended."""

from collections import Counter
from itertools import accumulate, chain

from troupellm.actors.scheduler.fair_share import Shares
from troupellm.actors.scheduler.open_requests import Ledger
from troupellm.actors.scheduler.plans import PLAIN, Aligned, Flight
from troupellm.actors.scheduler.running_set import Residents
from troupellm.actors.scheduler.speculative_rows import settle
from troupellm.actors.sequences.sequence import NO_EPOCH, Event, LastToken, Sequence
from troupellm.protocol.errors import GUIDE_SPENT
from troupellm.protocol.messages.output import RowFinished

Shown = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rows, token counts and tokens, as in `StepOutput`."""
Gaps = tuple[tuple[float, int], ...]
"""Seconds between two tokens of a sequence, and how many sequences had them."""


class _Crowd:
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


class Acceptance:
    """Three ways to the same end: the usual step, one with accepted drafts, and row by row."""

    def __init__(self, ledger: Ledger, residents: Residents, shares: Shares) -> None:
        self._ledger = ledger
        self._residents = residents
        self._shares = shares
        self._crowd = _Crowd([])
        self._spent: list[Sequence] = []
        self.num_dropped = 0
        """Row results that named nothing alive."""

    def take_spent(self) -> list[Sequence]:
        """Sequences whose guide was used up: they start over with a new one."""
        spent, self._spent = self._spent, []
        return spent

    def gaps(self, flight: Flight, now: float) -> Gaps:
        """How long ago the sequences that sample had their last token; to be asked before `take`."""
        crowd = self._crowd
        times: dict[float, int]
        if flight.clean and flight.samplers == crowd.sequences:
            times = {crowd.last_token.at: len(crowd.sequences)}
        else:
            times = Counter([each.last_token.at for each in flight.samplers if each.epoch != NO_EPOCH])
        return tuple([(now - time, count) for time, count in times.items() if time and count])

    def take(self, flight: Flight, aligned: Aligned, now: float) -> Shown:
        """Take the part of a result that is shown to readers. `aligned` is the result of `Updates.check`."""
        whole = flight.clean and not aligned.errors and not aligned.finished
        if whole and aligned.token_counts == flight.expected:
            return self._accept_plain(flight, aligned.tokens, now)
        if whole and flight.limits:
            return self._accept_several(flight, aligned, now)
        return self._accept_odd(flight, aligned, now)

    def _accept_plain(self, flight: Flight, tokens: tuple[int, ...], now: float) -> Shown:
        """The usual step: every row answered as planned and nothing has ended since."""
        samplers = flight.samplers
        crowd = self._crowd
        if samplers != crowd.sequences:
            crowd = self._crowd = _Crowd(samplers)
        rows = flight.rows if samplers is flight.sequences else tuple([sequence.row for sequence in samplers])
        for known, token in zip(crowd.texts, tokens, strict=True):
            known.append(token)
        crowd.last_token.at = now
        if flight.limits:
            for sequence, limit in zip(flight.sequences, flight.limits, strict=True):
                if limit > 0:
                    sequence.slack -= limit
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

    def _accept_several(self, flight: Flight, aligned: Aligned, now: float) -> Shown:
        """Drafts were accepted, and otherwise it is the usual step."""
        counts, tokens, samplers, step = aligned.token_counts, aligned.tokens, flight.samplers, flight.step
        drawn = len(counts) + sum(aligned.accepted)
        if samplers is not flight.sequences or 0 in counts or drawn != len(tokens):
            return self._accept_odd(flight, aligned, now)
        crowd = self._crowd
        if samplers != crowd.sequences:
            crowd = self._crowd = _Crowd(samplers)
        crowd.last_token.at = now
        careful = crowd.watched or not crowd.stops.isdisjoint(tokens)
        kept_counts, kept_tokens = list(counts), tokens
        position, cut = 0, False
        for index, (sequence, known, count) in enumerate(zip(samplers, crowd.texts, counts, strict=True)):
            span = tokens[position : position + count]
            position += count
            ahead = sequence.last_step > step  # as `settle`, for all that have no tokens without KV but the last one
            sequence.num_computed = len(known) + count - 1 + ahead
            sequence.slack = sequence.draft_limit if ahead else 0
            if not careful and len(known) + count < sequence.limit:
                known.extend(span)
                continue
            kept_counts[index], finished = accept(sequence, span)
            if finished is not None:
                cut = True
                self._finish(sequence, finished)
        self._charge(samplers, kept_counts)
        crowd.steps_left -= max(counts)
        if cut:
            self._crowd = _Crowd([])
            kept_tokens = _cut(tokens, counts, kept_counts)
        rows = flight.rows
        return rows, tuple(kept_counts), kept_tokens

    def _charge(self, sequences: list[Sequence], counts: list[int]) -> None:
        """For tokens beyond the one that each running sequence is charged for in every step."""
        extra: dict[str, int] = {}
        for sequence, count in zip(sequences, counts, strict=True):
            if count > 1:
                tenant = sequence.request.tenant
                extra[tenant] = extra.get(tenant, 0) + count - 1
        for tenant, tokens in extra.items():
            self._shares.charge_generated(tenant, tokens)

    def _accept_odd(self, flight: Flight, aligned: Aligned, now: float) -> Shown:
        """Row by row: ended and preempted sequences, failures, several tokens for a row."""
        self._crowd = _Crowd([])
        rows: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        position = 0
        alive: list[Sequence] = []
        size = len(flight.rows)
        limits, accepted = flight.limits or (PLAIN,) * size, aligned.accepted or (0,) * size
        planned = zip(
            flight.sequences, flight.epochs, flight.counts, aligned.token_counts, limits, accepted, strict=True
        )
        for index, (sequence, epoch, positions, count, limit, taken) in enumerate(planned):
            span = aligned.tokens[position : position + count]
            position += count
            if sequence.epoch != epoch:
                self.num_dropped += 1
                continue
            error = aligned.errors.get(index)
            if error is not None and error.code == GUIDE_SPENT and not (sequence.guide_rebuilt or sequence.lockstep):
                sequence.guide_rebuilt = True
                self._spent.append(sequence)
                continue
            if error is not None:
                self._ledger.fail(sequence, error.message, error.code)
                continue
            if limit != PLAIN:
                settle(sequence, flight.step, limit, count, taken)
            if not count:
                sequence.forced = max(0, sequence.forced - positions - max(limit, 0))
            elif not sequence.lockstep:
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
                _recount(sequence, elastic=limit != PLAIN)
                self._residents.disturb()
        if flight.limits:
            self._charge(alive, counts)
        return tuple(rows), tuple(counts), tuple(tokens)

    def _finish(self, sequence: Sequence, finished: RowFinished) -> None:
        sequence.request.reason = finished.reason
        self._ledger.finished.append(finished)
        self._ledger.end(sequence, Event.STOP)


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


def _recount(sequence: Sequence, *, elastic: bool) -> None:
    """After several tokens, or none: tokens without KV are computed next. Of an elastic row that is settled already."""
    known = len(sequence.tokens)
    if not elastic:
        sequence.num_computed = min(sequence.num_computed, known - 1)
    if sequence.num_computed >= known - 1:
        sequence.open_fence()
    else:
        sequence.fence = -1
