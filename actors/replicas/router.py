"""Requests of a fleet on their way to replicas, and their answers back.

A request waits for a replica that is ready, asks it for a place, and hands its prompt over. When the replica dies, or
is told to leave, the request goes to another one with the tokens that its reader has. A draw is a function of seed,
fork and position, so the reader gets the tokens of an undisturbed run. All state of a request is in its `FleetRequest`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

import anyio.abc

from troupellm.actors.admission.admission import AdmissionSlot
from troupellm.actors.engine.api_process_session import api_process_budget
from troupellm.actors.kv_cache.block_hash import PrefixHasher, namespace, split_keys
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.replicas.chooser import Chooser, Place, cost_of
from troupellm.actors.replicas.replica import Replica
from troupellm.actors.replicas.request import FleetRequest
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.config.engine import StreamConfig
from troupellm.protocol.config.parallel import ParallelConfig
from troupellm.protocol.errors import EngineOverloaded, EngineStopped, RequestAborted, TroupeError, WorkerCrashed
from troupellm.protocol.messages.input import Demand, Submission
from troupellm.protocol.messages.scheduler import AbortRequest, ReaderPaused, ReaderResumed, SchedulerControl
from troupellm.protocol.wire.api_process import (
    Abort,
    Admitted,
    Apply,
    Chunks,
    Ended,
    PauseReader,
    ResumeReader,
)

logger = logging.getLogger("troupellm.server")


class Router:
    def __init__(
        self, config: ParallelConfig, stream: StreamConfig, replicas: Sequence[Replica], clock: Clock, secret: bytes
    ) -> None:
        """secret: for the names of blocks, which never leave this process."""
        self._config = config
        self._stream = stream
        self._replicas = replicas
        self._clock = clock
        self._secret = secret
        self._hasher: PrefixHasher | None = None
        self._chooser = Chooser(config.data_parallel_router)
        self._numbers = count(1)
        self._open: dict[int, FleetRequest] = {}
        self._waiters: list[Waiter] = []
        self._emptied: list[Waiter] = []
        self.group: anyio.abc.TaskGroup | None = None
        """In which requests move."""
        self.failovers: Counter[str] = Counter()
        """Requests that moved, by reason: died, drained."""
        self.stopped: Callable[[], EngineStopped | None] = lambda: None
        """Why no replica will ever be ready again."""

    def __len__(self) -> int:
        """Open requests."""
        return len(self._open)

    # A request's way in.

    def open(self, submission: Submission, slot: AdmissionSlot) -> FleetRequest:
        number = next(self._numbers)
        outbox = LocalOutbox(
            number,
            arrival=self._clock.now(),
            slot=slot,
            clock=self._clock,
            budget=api_process_budget(self._stream) if submission.streaming else None,
            to_scheduler=self._control,
            on_terminal=self._on_terminal,
        )
        slot.handed_over = True
        outbox.quota = slot.quota
        request = self._open[number] = FleetRequest(submission, slot, outbox)
        return request

    def name_blocks(self, request: FleetRequest, block_size: int) -> None:
        """Give a prepared request the keys by which replicas are chosen."""
        if not self._chooser.reads_prefixes:
            return
        if self._hasher is None:
            self._hasher = PrefixHasher(self._secret, block_size)
        asked = request.submission
        owner = namespace(tenant=asked.tenant, cache_salt=asked.cache_salt, adapter=asked.adapter)
        request.keys = split_keys(self._hasher.prompt_keys(owner, request.prompt_bytes))[1:]

    async def place(self, request: FleetRequest) -> None:
        """Bring a request to a replica, and to another one where that is full or dies meanwhile.

        Returns early when the request ends.

        Raises:
            EngineOverloaded: it had no place twice, and does not wait.
            EngineStopped: no replica will serve it.
        """
        refused: list[Replica] = []
        while not request.outbox.terminal:
            replica = await self._ready(request, refused)
            if replica is None:
                return
            waits = request.moved or request.submission.wait
            self._apply(request, replica, wait=waits)
            await request.answered.wait()
            if request.admitted:
                request.submitted = True
                replica.post(request.submit())
                if request.outbox.paused_since is not None:
                    replica.post(PauseReader(request.number))
                return
            if request.refusal is None:  # the replica is gone, or the request has ended
                continue
            if not isinstance(request.refusal, EngineOverloaded) or waits or refused:
                raise request.refusal
            refused.append(replica)

    async def _ready(self, request: FleetRequest, refused: Sequence[Replica]) -> Replica | None:
        """The replica to try next; None where the request ends first."""
        while not request.outbox.terminal:
            ready = [each for each in self._replicas if each.state == "ready" and each.place is not None]
            pinned = request.submission.hints.replica
            if pinned is not None and not request.moved:
                ready = [each for each in ready if each.number == pinned]
                if self._replicas[pinned].state == "failed":
                    raise EngineStopped(f"replica {pinned} has failed", code="engine_failed")
            able = [each for each in ready if each.unready is None] or ready
            fresh = [each for each in able if each not in refused] or able
            if fresh:
                return self._choose(request, fresh)
            if (error := self.stopped()) is not None:
                raise error
            waiter = new_waiter()
            self._waiters.append(waiter)
            try:
                await waiter.wait()
            finally:
                if waiter in self._waiters:  # it was not woken
                    self._waiters.remove(waiter)
        return None

    def _choose(self, request: FleetRequest, ready: Sequence[Replica]) -> Replica:
        places = {each.place: each for each in ready if each.place is not None}
        tokens = request.num_prompt_tokens
        return places[self._chooser.choose(list(places), request.keys, tokens)]

    def _apply(self, request: FleetRequest, replica: Replica, *, wait: bool) -> None:
        submission, params, place = request.submission, request.submission.params, replica.place
        assert place is not None
        tokens = request.num_prompt_tokens
        most = 0 if submission.pooling is not None else params.max_tokens
        request.cost = cost_of(tokens - place.held_tokens(request.keys), most, params.num_sequences)
        self._take_place(request, place)
        place.hold(request.keys)
        request.number = next(self._numbers)
        request.answered, request.admitted, request.refusal = new_waiter(), False, None
        replica.requests[request.number] = request
        demand = Demand(
            sequences=params.num_sequences,
            tokens=tokens,
            max_tokens=params.num_sequences * (most or 0),
            tenant=submission.tenant,
        )
        replica.post(
            Apply(
                request=request.number,
                arrival=request.outbox.arrival,
                demand=demand,
                wait=wait,
                deadline=None if request.begun else submission.deadline,
                moved=request.moved,
            )
        )

    # From a replica.

    def on_message(self, replica: Replica, message: Admitted | Ended | Chunks) -> None:
        match message:
            case Chunks():
                self._deliver(replica, message)
            case Admitted(request=number):
                if (request := replica.requests.get(number)) is not None:
                    request.admitted = True
                    request.answered.wake()
            case Ended():
                self._end(replica, message)

    def _deliver(self, replica: Replica, message: Chunks) -> None:
        requests, touched = replica.requests, dict[int, LocalOutbox]()
        for number in message.opened:
            if (request := requests.get(number)) is not None and request.outbox.prompt_token_ids is None:
                request.outbox.opened(tuple(memoryview(request.prompt_bytes).cast("i")))
        for prompt in message.prompts:
            if (request := requests.get(prompt.request)) is not None:
                request.outbox.prompt_logprobs(prompt.entries[request.take_prompt(prompt.entries) :])
        for chunk in message.chunks:
            request = requests.get(chunk.request)
            if request is None or (delta := request.take(chunk)) is None:
                continue
            if request.first_token is None:
                request.first_token = self._clock.now()
            request.outbox.push(delta)
            touched[chunk.request] = request.outbox
        for outbox in touched.values():
            outbox.wake()
        for end in message.ended:
            self._end(replica, end)

    def _end(self, replica: Replica, end: Ended) -> None:
        request = replica.requests.pop(end.request, None)
        if request is None:
            return
        self._leave_place(request, replica)
        error = None if end.error is None else end.error.error()
        outbox = request.outbox
        if error is None or outbox.cancelled or not _engine_failed(error):  # else another replica ends it
            request.spent = end.usage
        if error is not None and not outbox.cancelled and _engine_failed(error):
            replica.state, replica.reason = "starting", error.message  # its process is about to end
            if request.submitted:
                self._move(request, "died")
            else:  # its own task looks for another replica
                request.leave(died=False)
                request.answered.wake()
        elif not request.submitted and not outbox.cancelled:
            request.refusal = error
            request.answered.wake()
        elif error is not None:
            outbox.fail(error)
            request.answered.wake()
        elif end.usage is not None:
            if end.pooled is not None:
                outbox.pooled(end.pooled)
            self._close(request, end)

    def _close(self, request: FleetRequest, end: Ended) -> None:
        arrival, timing = request.outbox.arrival, end.timing
        scheduled, first = (None if time is None else arrival + time for time in (timing.scheduled, timing.first_token))
        if request.moved and request.first_token is not None:  # its replica's times are those of the rest
            scheduled, first = min(scheduled or request.first_token, request.first_token), request.first_token
        assert end.usage is not None
        request.outbox.close(end.usage, scheduled, first)

    # Failover.

    def on_lost(self, replica: Replica) -> None:
        """Its process is gone: its requests go to others."""
        self._clear(replica, "died")
        self.on_change()

    def empty(self, replica: Replica) -> None:
        """Its process is to end: its requests go to others."""
        for number in replica.requests:
            replica.post(Abort(number))
        self._clear(replica, "drained")

    def on_change(self) -> None:
        """A replica is ready, or will never be."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def _clear(self, replica: Replica, reason: str) -> None:
        requests, replica.requests = list(replica.requests.values()), {}
        for request in requests:
            self._leave_place(request, replica)
            if request.outbox.cancelled:
                request.outbox.fail(_aborted())
                request.answered.wake()
            elif request.submitted:
                self._move(request, reason)
            else:  # its own task looks for another replica
                request.leave(died=False)
                request.answered.wake()

    def _move(self, request: FleetRequest, reason: str) -> None:
        request.leave(died=reason == "died")
        if request.complete:  # only its end was not told
            request.outbox.close(request.usage(), request.first_token, request.first_token)
        elif request.moves > self._config.failover_limit:
            text = f"{request.moves} replicas died while they computed this request (failover_limit)"
            request.outbox.fail(EngineStopped(text, code="engine_failed"))
        elif request.begun and request.submission.params.use_beam_search:
            request.outbox.fail(EngineStopped("the replica died while it told the beams", code="engine_failed"))
        else:
            self.failovers[reason] += 1
            assert self.group is not None
            self.group.start_soon(self._place_again, request)

    async def _place_again(self, request: FleetRequest) -> None:
        try:
            await self.place(request)
        except TroupeError as error:
            request.outbox.fail(error)
        except Exception:  # a fault of ours ends one request, and not the fleet
            logger.exception("a request could not be moved to another replica")
            if (replica := self._replica_of(request)) is not None:
                replica.post(Abort(request.number))
            text = "the request could not be moved to another replica"
            request.outbox.fail(EngineStopped(text, code="engine_failed"))

    # Ends.

    def end_all(self, make_error: Callable[[], TroupeError]) -> None:
        """Each gets an error of its own, since raising one changes it."""
        for request in list(self._open.values()):
            request.outbox.fail(make_error())
            request.answered.wake()
        self.on_change()

    async def wait_empty(self, timeout: float) -> bool:
        """Until nothing is open, or False after `timeout` seconds."""
        if not self._open:
            return True
        waiter = new_waiter()
        self._emptied.append(waiter)
        return await waiter.wait(timeout)

    def _on_terminal(self, number: int) -> None:
        request = self._open.pop(number, None)
        if request is not None:
            charged = request.charged()
            request.slot.settle(charged.prompt_tokens, charged.completion_tokens)
        if not self._open:
            emptied, self._emptied = self._emptied, []
            for waiter in emptied:
                waiter.wake()

    def _control(self, message: SchedulerControl) -> None:
        """Pass an outbox's control message to the request's replica."""
        assert isinstance(message, AbortRequest | ReaderPaused | ReaderResumed), "an outbox says nothing else"
        request = self._open.get(message.request)
        if request is None:
            return
        replica = self._replica_of(request)
        if isinstance(message, AbortRequest):
            if replica is None:
                request.outbox.fail(_aborted())
                self.on_change()  # its task waits for a replica
            else:
                replica.post(Abort(request.number))
        elif replica is not None and request.submitted:
            number = request.number
            replica.post(PauseReader(number) if isinstance(message, ReaderPaused) else ResumeReader(number))

    def _replica_of(self, request: FleetRequest) -> Replica | None:
        return next((each for each in self._replicas if each.requests.get(request.number) is request), None)

    @staticmethod
    def _take_place(request: FleetRequest, place: Place) -> None:
        place.work += request.cost
        place.rows += request.submission.params.num_sequences

    @staticmethod
    def _leave_place(request: FleetRequest, replica: Replica) -> None:
        if replica.place is not None:
            replica.place.work -= request.cost
            replica.place.rows -= request.submission.params.num_sequences


def _engine_failed(error: TroupeError) -> bool:
    return isinstance(error, EngineStopped | WorkerCrashed) and error.code == "engine_failed"


def _aborted() -> RequestAborted:
    return RequestAborted("the request was ended before its answer was complete")
