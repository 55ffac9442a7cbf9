"""The output actor's handling of each message, without the loop around it.

The hot path is a token of a sequence without stop strings and log-probabilities: its id is kept, and becomes text when
the reader is woken. First tokens, ends and everything else take the careful path below it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

import msgspec

from troupellm.actors.output.detokenizer import SequenceText, TextTables
from troupellm.actors.output.logprobs import token_logprobs
from troupellm.actors.output.rows import NO_ROWS, OutputRequest, OutputRow, StepRows
from troupellm.actors.output.stop_strings import StopRegions, StopStrings
from troupellm.protocol.errors import TroupeError, row_failure
from troupellm.protocol.messages.output import OpenRequest, OutputMessage, RequestClosed, RowFinished, StepOutput
from troupellm.protocol.messages.scheduler import AbortRequest, SchedulerControl, StopStringMet
from troupellm.protocol.messages.worker import RowLogprobs
from troupellm.protocol.params.outputs import Delta, FinishReason, TokenLogprob

_LONGEST_PAUSE = 0.1
"""Seconds between two wakes of a reader, however many there are."""
_WAKES = 64
"""Readers that are woken without a pause: 2 ms, where that writes their pieces."""
_PORTION = 2048
"""Log-probabilities that are read without a pause, alternatives included: 3 ms."""


class OutputCore:
    """All state of the output actor. Times are seconds on the engine's clock, passed in."""

    def __init__(
        self,
        tables: TextTables,
        to_scheduler: Callable[[SchedulerControl], None],
        flush_interval: float,
        on_closed: Callable[[RequestClosed], None] = lambda closed: None,
        *,
        wakes_per_second: float = 0.0,
        most_wakes_per_second: float = 0.0,
    ) -> None:
        self._tables = tables
        self._to_scheduler = to_scheduler
        self._flush_interval = flush_interval
        self._wake_seconds = 1.0 / wakes_per_second if wakes_per_second else flush_interval
        most = max(wakes_per_second, most_wakes_per_second) if most_wakes_per_second else math.inf
        self._least_wake_seconds = 1.0 / most
        self._report_closed = on_closed
        self._requests: dict[int, OutputRequest] = {}
        self._rows: dict[int, OutputRow] = {}
        self._keeping: dict[int, OutputRow] = {}
        """Those that take the hot path."""
        self._stopped: dict[int, OutputRequest] = {}
        """By row, those of open requests that have met a stop string."""
        self._step_rows = NO_ROWS
        """Rows of the last step that take the hot path; `NO_ROWS` once a row has joined or left the hot path."""
        self._readers = 0
        """Requests that stream and have a first token: those that wait or answer in one piece are not woken."""
        self._pause = 0.0
        """Seconds between two wakes of one reader."""
        self._dirty: list[OutputRequest] = []
        self.next_flush: float | None = None
        """When `flush` has something to do; None while every reader has seen its pieces."""

    def read_prompt(self, message: OutputMessage) -> Iterator[None]:
        """Take in a message's log-probabilities of prompts, which comes before `handle`.

        Pauses every few milliseconds, since those of a long prompt take a hundred.
        """
        if isinstance(message, StepOutput):
            for entry in message.prompt_logprobs:
                yield from self._on_prompt_logprobs(entry)

    def handle(self, message: OutputMessage, now: float) -> None:
        """Everything else in a message."""
        match message:
            case StepOutput():
                self._on_step(message, now)
            case OpenRequest():
                self._on_open(message)
            case _:
                assert_never(message)

    def flush(self, now: float) -> Iterator[None]:
        """Wake the readers whose time has come. Pauses now and then, since a wake may be a send."""
        if self.next_flush is None or now < self.next_flush:
            return
        waiting: list[OutputRequest] = []
        earliest = math.inf
        dirty, self._dirty = self._dirty, waiting
        woken = 0
        for request in dirty:
            if not request.dirty:
                continue
            due = request.due
            if now >= due:
                self._wake(request, now)
                woken += 1
                if woken % _WAKES == 0:
                    yield
            else:
                waiting.append(request)
                if due < earliest:
                    earliest = due
        self.next_flush = earliest if waiting else None

    def _on_open(self, message: OpenRequest) -> None:
        request = self._requests[message.request] = OutputRequest(message)
        tables, skip = self._tables, message.skip_special_tokens
        stops = StopStrings(message.stop_strings) if message.stop_strings else None
        regions = StopRegions(message.stop_regions, message.stop_inside) if stops and message.stop_regions else None
        known = message.generated or (b"",) * len(message.rows)
        indices = message.indices or range(len(message.rows))
        for index, number, generated in zip(indices, message.rows, known, strict=True):
            text: SequenceText | None = None
            if message.detokenize:
                text = SequenceText(
                    tables.decoder(
                        skip_special_tokens=skip,
                        spaces=message.spaces_between_special_tokens,
                        kept=message.kept_token_ids,
                    ),
                    stops,
                    include_stop=message.include_stop_str_in_output,
                    min_tokens=message.min_tokens,
                    regions=regions,
                )
            if text is not None and generated:  # its reader has their text
                text.feed(memoryview(generated).cast("i"))
            row = self._rows[number] = OutputRow(index, request, text)
            request.members.append(row)
            row.logprobs = message.logprobs is not None
            row.show_stop_token = message.include_stop_str_in_output
        if request.interval == 1:
            request.outbox.keep_apart()
        request.outbox.opened(tuple(memoryview(message.prompt_token_ids).cast("i")))
        self._deliver_prompt_logprobs(request)
        request.outbox.wake()

    def _on_step(self, message: StepOutput, now: float) -> None:
        finished = {end.row: end for end in message.finished} if message.finished else {}
        for number in finished:
            self._leave_hot_path(number)
        if message.rows != self._step_rows.rows:
            self._step_rows = StepRows(message.rows, self._keeping)
        open_rows, counts = self._step_rows.open_rows, message.token_counts
        if len(open_rows) == len(counts) == counts.count(1):  # the usual step
            for row, token in zip(open_rows, message.tokens, strict=True):
                row.ids.append(token)
                if not row.request.dirty:
                    self._mark(row.request, row.index)
        else:
            self._take(message, self._step_rows.kept, finished, now)
        for end in finished.values():
            if end.row in self._rows:
                self._advance(self._rows[end.row], end.row, (), None, end, now)
        for pooled in message.pooled:
            if (pooled_row := self._rows.get(pooled.row)) is not None:
                pooled_row.request.outbox.pooled(pooled.vector)
        for failure in message.failed:
            self._on_row_failed(failure.row, row_failure(failure.message, failure.code), message.closed)
        for closed in message.closed:
            self._on_closed(closed)

    def _take(
        self,
        message: StepOutput,
        kept: Sequence[OutputRow | None],
        finished: dict[int, RowFinished],
        now: float,
    ) -> None:
        """A step's tokens, row by row. Whose end was told with them leaves `finished`."""
        logprobs = {entry.row: entry for entry in message.logprobs} if message.logprobs else {}
        rows, tokens, offset = self._rows, message.tokens, 0
        for number, keeper, count in zip(message.rows, kept, message.token_counts, strict=True):
            if keeper is not None and count == 1:
                keeper.ids.append(tokens[offset])
                if not keeper.request.dirty:
                    self._mark(keeper.request, keeper.index)
                offset += 1
                continue
            start, offset = offset, offset + count
            row = rows.get(number)
            if row is None:  # it has met a stop string, or failed
                if number in self._stopped:
                    self._stopped[number].num_cut += count
                continue
            if row.stepwise is not None and count == 1 and number not in finished:
                self._look_for_stop(row, number, row.stepwise, tokens[start], now)
                continue
            self._advance(row, number, tokens[start:offset], logprobs.get(number), finished.pop(number, None), now)

    def _advance(
        self,
        row: OutputRow,
        number: int,
        token_ids: tuple[int, ...],
        logprobs: RowLogprobs | None,
        end: RowFinished | None,
        now: float,
    ) -> None:
        """The careful path: any number of tokens, stop strings, log-probabilities, the end of the sequence."""
        self._settle(row)
        shown, used, reason, stop = self._show(row, token_ids, end)
        entries: tuple[TokenLogprob, ...] | None = None
        if logprobs is not None and row.logprobs:
            entries = tuple(token_logprobs(logprobs, self._tables))[:used]
        request = row.request
        request.num_cut += len(token_ids) - used
        if not (used or shown or reason):
            return
        request.outbox.push(
            Delta(
                index=row.index,
                text=shown,
                token_ids=token_ids[:used],
                logprobs=entries,
                finish_reason=reason,
                stop_reason=stop,
            )
        )
        if reason is not None:
            del self._rows[number]
            self._leave_hot_path(number)
            if end is None:
                self._report_stopped(number, request)
            self._wake(request, now)
        elif row.started:
            self._mark(request, row.index, used)
        else:
            self._start(row, number, now)

    def _start(self, row: OutputRow, number: int, now: float) -> None:
        """The sequence has its first token; from here on it may take the hot path."""
        row.started = True
        if row.request.outbox.streams and not row.request.begun:
            row.request.begun = True
            self._readers += 1
            self._share_wakes()
        if not row.logprobs:
            if row.text is None or row.text.plain:
                self._keeping[number] = row
                self._step_rows = NO_ROWS
            else:
                row.stepwise = row.text
        self._wake(row.request, now)

    def _settle(self, row: OutputRow) -> None:
        """Show the tokens that were kept."""
        ids = row.ids
        if not ids:
            return
        push = row.request.outbox.push
        if row.request.interval != 1:
            push(Delta(index=row.index, text=row.feed(ids), token_ids=tuple(ids)))
        else:
            for token_id in ids:
                push(Delta(index=row.index, text=row.feed((token_id,)), token_ids=(token_id,)))
        ids.clear()

    def _look_for_stop(self, row: OutputRow, number: int, text: SequenceText, token_id: int, now: float) -> None:
        """One more token of a sequence with stop strings."""
        shown, stop = text.feed_one(token_id)
        push = row.request.outbox.push
        if stop is None:
            push(Delta(index=row.index, text=shown, token_ids=(token_id,)))
            self._mark(row.request, row.index)
            return
        push(Delta(index=row.index, text=shown, token_ids=(token_id,), finish_reason="stop", stop_reason=stop))
        del self._rows[number]
        self._report_stopped(number, row.request)
        self._wake(row.request, now)

    def _report_stopped(self, number: int, request: OutputRequest) -> None:
        self._stopped[number] = request
        self._to_scheduler(StopStringMet(number))

    def _show(
        self, row: OutputRow, token_ids: tuple[int, ...], end: RowFinished | None
    ) -> tuple[str, int, FinishReason | None, int | str | None]:
        """Text to show, tokens used, finish reason and stop reason."""
        ended = (None, None) if end is None else (end.reason, end.stop_token_id)
        if row.text is None:
            return "", len(token_ids), *ended
        hidden = end is not None and end.hide_last and not row.show_stop_token
        shown, used, stop = row.text.feed(token_ids[:-1] if hidden else token_ids)
        if stop is not None:
            return shown, used, "stop", stop
        if end is not None:
            rest, stop = row.text.finish()
            shown += rest
            if stop is not None:
                return shown, len(token_ids), "stop", stop
        return shown, len(token_ids), *ended

    def _on_prompt_logprobs(self, entry: RowLogprobs) -> Iterator[None]:
        """Collect them over the chunks of a prompt; a chunk that is computed again after a preemption adds nothing."""
        row = self._rows.get(entry.row)
        if row is None or row.index != 0 or row.request.prompt_entries is None:
            return
        entries = row.request.prompt_entries
        known = len(entries) - entry.position
        if known < 0:
            return
        portion = max(1, _PORTION // entry.width)
        for index, logprob in enumerate(token_logprobs(entry, self._tables)):
            if index >= known:
                entries.append(logprob)
            if index % portion == portion - 1:
                yield
        self._deliver_prompt_logprobs(row.request)

    def _deliver_prompt_logprobs(self, request: OutputRequest) -> None:
        if request.prompt_entries is not None and len(request.prompt_entries) >= request.prompt_tokens:
            request.outbox.prompt_logprobs(request.prompt_entries)
            request.prompt_entries = None

    def _on_row_failed(self, number: int, error: TroupeError, closed: Sequence[RequestClosed]) -> None:
        """One failed sequence fails its request; where that is closed already, its end says so, and what it used."""
        row = self._rows.get(number)
        if row is None or any(other.request == row.request.number for other in closed):
            return
        request = row.request
        self._settle_all(request)
        self._forget(request)
        request.outbox.fail(error)
        request.outbox.wake()
        self._to_scheduler(AbortRequest(request.number))

    def _on_closed(self, closed: RequestClosed) -> None:
        request = self._requests.get(closed.request)
        if request is not None and (request.truncated or request.num_cut):
            shown = closed.usage.completion_tokens - request.num_cut
            usage = msgspec.structs.replace(closed.usage, truncated=request.truncated, completion_tokens=shown)
            closed = msgspec.structs.replace(closed, usage=usage)
        self._report_closed(closed)
        if request is None:
            return
        complete = self._rows.keys().isdisjoint(request.rows)  # errors behind the sequences' ends do not count
        self._settle_all(request)
        self._forget(request)
        if closed.error is None or complete:
            request.outbox.close(closed.usage, closed.scheduled, closed.first_token)
        else:
            request.outbox.fail(closed.error, closed.spent)
        request.outbox.wake()

    def _forget(self, request: OutputRequest) -> None:
        del self._requests[request.number]
        if request.begun:
            self._readers -= 1
            self._share_wakes()
        request.dirty = False
        for number in request.rows:
            self._rows.pop(number, None)
            self._stopped.pop(number, None)
            self._leave_hot_path(number)

    def _leave_hot_path(self, number: int) -> None:
        """Idempotent."""
        self._keeping.pop(number, None)
        self._step_rows = NO_ROWS

    def _share_wakes(self) -> None:
        """There is one reader more or less."""
        few = min(self._flush_interval, self._readers * self._wake_seconds)
        many = min(self._readers * self._least_wake_seconds, _LONGEST_PAUSE)
        self._pause = max(few, many)

    def _settle_all(self, request: OutputRequest) -> None:
        for row in request.members:
            if row.ids:
                self._settle(row)

    def _mark(self, request: OutputRequest, index: int, tokens: int = 1) -> None:
        """The reader has something to see, at the latest when its interval is over."""
        if request.interval is not None:
            unseen = request.unseen[index] = request.unseen.get(index, 0) + tokens
            if unseen < request.interval:
                return
        if not request.dirty:
            request.dirty = True
            self._dirty.append(request)
            if self.next_flush is None or request.due < self.next_flush:
                self.next_flush = request.due

    def _wake(self, request: OutputRequest, now: float) -> None:
        for row in request.members:
            if row.ids:
                self._settle(row)
        request.dirty = False
        if request.interval is None:
            request.due = now + (self._pause if request.begun else self._flush_interval)
        else:
            request.unseen.clear()
        request.outbox.wake()
