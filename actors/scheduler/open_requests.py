"""The open requests and their ends: each request is closed exactly once, when its last sequence ends.

Plans in flight may name it still, and its blocks come back with them; nothing that they produce for it is shown.
"""

from collections.abc import Callable

from troupellm.actors.scheduler.leases import Leases
from troupellm.actors.scheduler.plans import PlansInFlight
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.actors.sequences.sequence import NO_EPOCH, Event, Request, Sequence, State
from troupellm.protocol.errors import RequestAborted, RequestFailed, TroupeError, row_failure
from troupellm.protocol.messages.media import count_vectors
from troupellm.protocol.messages.metrics import RequestStats, StepStats
from troupellm.protocol.messages.output import RequestClosed, RowFailed, RowFinished, StepOutput
from troupellm.protocol.messages.scheduler import SubmitRequest
from troupellm.protocol.params.outputs import Usage

_NOT_STARTED = frozenset({State.WAITING, State.PREEMPTED, State.HELD})


class OpenRequests:
    """Opens and ends requests. `now` is the time of the last plan, result or submission, in seconds."""

    def __init__(self, running_set: RunningSet, waiting_queue: WaitingQueue) -> None:
        self._running_set = running_set
        self._waiting = waiting_queue
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.finished: list[RowFinished] = []
        self.failed: list[RowFailed] = []
        self.closed: list[RequestClosed] = []
        self.stats: list[StepStats | RequestStats] = []
        """For the metrics, of steps too."""
        self.on_end: Callable[[Sequence], None] | None = None
        """Is told of each guided sequence that ends."""
        self.leases: Leases | None = None
        """Leases what a sequence has when it ends."""

    def open(self, request: Request) -> None:
        """Let a request in. Its other sequences wait for the first to compute their prompt.

        They do not wait if another engine began the request: the first may be long, and ends with tokens of its own.
        """
        loading = {sequence.request.tenant for sequence in self._running_set.loading.values()}
        self._waiting.arrive(request.tenant, loading)
        self.requests[request.number] = request
        request.num_live = request.num_going = len(request.sequences)
        for sequence in request.sequences:
            self.sequences[sequence.row] = sequence
        request.prompt_computed = any(sequence.num_generated for sequence in request.sequences)
        for sequence in request.sequences if request.prompt_computed else request.sequences[:1]:
            self._waiting.add(sequence)

    def prompt_computed(self, sequence: Sequence) -> None:
        """A sequence has computed all its tokens: the siblings may start from what they share. Idempotent.

        Beams that have not begun yet start as its children, not on their own.
        """
        request = sequence.request
        if request.prompt_computed or (request.search is not None and not request.search.begun):
            return
        request.prompt_computed = True
        others = [other for other in request.sequences if other.state in _NOT_STARTED and other is not sequence]
        if others:
            self._running_set.shared_prompts.hold(sequence)
            if request.search is not None:
                self._running_set.regrouping[request.number] = request
        for other in others:
            if other.state is not State.HELD and other not in self._waiting:
                self._waiting.add(other)

    def refuse(self, message: SubmitRequest, error: TroupeError) -> None:
        """Close a request that was never opened."""
        prompt_tokens = len(message.prompt) // 4
        self.close_unknown(message.request, error, prompt_tokens=prompt_tokens)
        self.stats.append(
            RequestStats(
                reason="abort" if isinstance(error, RequestAborted) else "error",
                n=len(message.sequences),
                max_tokens=message.max_tokens,
                prompt_tokens=prompt_tokens,
                completion_tokens=0,
                queue_seconds=None,
                prefill_seconds=None,
                decode_seconds=None,
                first_token_seconds=None,
                total_seconds=max(0.0, self.now - message.arrival),
            )
        )

    def close_unknown(self, request: int, error: TroupeError, *, prompt_tokens: int = 0) -> None:
        """Close a request that is not here: it was refused, has ended, or was aborted on its way in."""
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=0)
        self.closed.append(RequestClosed(request=request, usage=usage, scheduled=None, first_token=None, error=error))

    def pause(self, number: int) -> None:
        """Leave a request's sequences out of the plans until `resume`. Idempotent."""
        request = self.requests.get(number)
        if request is None or request.paused or request.search is not None:  # a search shows nothing before its end
            return
        request.paused = True
        for sequence in request.sequences:
            if sequence.state in (State.WAITING, State.PREEMPTED):
                self._running_set.hold(sequence)
            elif sequence.state is State.RUNNING:
                self._running_set.pause(sequence)

    def resume(self, number: int) -> None:
        """Idempotent."""
        request = self.requests.get(number)
        if request is None or not request.paused:
            return
        request.paused = False
        for sequence in request.sequences:
            if sequence.state is State.PAUSED:
                self._running_set.resume(sequence)
            elif sequence.state is State.HELD:
                self._running_set.let_go(sequence)

    def end(self, sequence: Sequence, event: Event) -> None:
        request = sequence.request
        if (request.leases or request.session) and event is not Event.FAIL and self.leases is not None:
            self.leases.ended(sequence)
        released = self._running_set.end(sequence, event)
        if sequence.sampling.guide is not None and self.on_end is not None:
            self.on_end(sequence)
        request.num_going -= 1
        if not request.num_going:
            self._close(request)
        if released:
            self._released(sequence)

    def end_request(self, request: Request, error: TroupeError) -> None:
        """All sequences that still go on end; the first error of a request is the one that its owner hears of."""
        live = [sequence for sequence in request.sequences if not sequence.ended]
        if live:  # else it is closed, and plans in flight hold its blocks
            request.error = request.error or error
        for sequence in live:
            self.end(sequence, Event.ABORT)

    def fail(self, sequence: Sequence, message: str, code: str) -> None:
        """A sequence cannot go on, and its request with it."""
        self.failed.append(RowFailed(sequence.row, message, code))
        error = sequence.request.error = sequence.request.error or row_failure(message, code)
        self.end(sequence, Event.FAIL)
        self.end_request(sequence.request, error)

    def release_returned(self) -> None:
        """After a plan came back: release the ended sequences that only it still named."""
        for sequence in self._running_set.returned():
            self._released(sequence)

    def _released(self, sequence: Sequence) -> None:
        """The blocks of a sequence that had ended are free."""
        sequence.handle(Event.RELEASE)
        del self.sequences[sequence.row]
        request = sequence.request
        request.num_live -= 1
        if request.num_live == 0:
            del self.requests[request.number]

    def take(self, step: int) -> StepOutput | None:
        """Take the ends since the last call; None if there are none."""
        if not (self.finished or self.failed or self.closed):
            return None
        output = StepOutput(
            step=step, finished=tuple(self.finished), failed=tuple(self.failed), closed=tuple(self.closed)
        )
        self.finished.clear()
        self.failed.clear()
        self.closed.clear()
        return output

    def _close(self, request: Request) -> None:
        generated = sum(sequence.num_generated for sequence in request.sequences)
        if request.search is not None and request.error is not None:
            generated = 0  # a search that did not end has shown nothing
        drafts = request.drafts
        usage = Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=generated,
            cached_tokens=request.cached_tokens,
            draft_steps=0 if drafts is None else drafts.steps,
            draft_tokens=0 if drafts is None else drafts.drafted,
            accepted_draft_tokens=0 if drafts is None else drafts.accepted,
            cached_sources=request.cached_sources,
            image_tokens=count_vectors(request.media),
        )
        self.closed.append(
            RequestClosed(
                request=request.number,
                usage=usage,
                scheduled=request.scheduled,
                first_token=request.first_token,
                error=request.error,
            )
        )
        self.stats.append(_request_stats(request, generated, self.now))

    def assert_invariants(self, plans_in_flight: PlansInFlight) -> None:
        """Every open sequence belongs to an open request, is not finished, and only plans in flight delay an end."""
        for sequence in self.sequences.values():
            assert sequence.request.number in self.requests, "a sequence without its request"
            assert sequence.state is not State.FINISHED, "a finished sequence is open"
            if sequence.state is State.FINISHING:
                assert sequence.epoch == NO_EPOCH, "an ended sequence could still match a result"
                assert sequence.last_step > plans_in_flight.last_returned, "an end waits for nothing"
        for request in self.requests.values():
            live = [sequence for sequence in request.sequences if sequence.state is not State.FINISHED]
            assert request.num_live == len(live) > 0, "a request is open without live sequences"


def _request_stats(request: Request, generated: int, now: float) -> RequestStats:
    last_token = max(sequence.last_token.at for sequence in request.sequences)
    scheduled, first = request.scheduled, request.first_token
    ratio = None if scheduled is None or not request.session else request.cached_tokens / request.num_prompt_tokens
    reason = "error" if isinstance(request.error, RequestFailed) else "abort" if request.error else request.reason
    return RequestStats(
        reason=reason or "abort",
        n=len(request.sequences),
        max_tokens=request.max_tokens,
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=generated,
        queue_seconds=None if scheduled is None else scheduled - request.arrival,
        prefill_seconds=None if first is None or scheduled is None else first - scheduled,
        decode_seconds=None if first is None else max(0.0, last_token - first),
        first_token_seconds=None if first is None else first - request.arrival,
        total_seconds=max(0.0, now - request.arrival),
        session_cached_ratio=ratio,
    )
