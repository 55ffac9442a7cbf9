"""The way in: a place, an outbox, and the request on its way to the input processor."""

from collections.abc import Callable

import anyio

from troupellm.actors.admission import Admission, Place, estimate_tokens
from troupellm.actors.mailbox import MailboxClosed
from troupellm.actors.outbox import LocalOutbox
from troupellm.actors.ports import Clock
from troupellm.actors.submission import Submission
from troupellm.actors.system import System
from troupellm.protocol.config import StreamConfig
from troupellm.protocol.errors import EngineOverloaded, RequestAborted, TroupeError
from troupellm.protocol.intake import PrepareRequest
from troupellm.protocol.metrics import RequestRejected


async def submit(system: System, clock: Clock, config: StreamConfig, request: Submission) -> LocalOutbox:
    """Hand a request over; returns where its answer will come out.

    Raises:
        EngineOverloaded: no place, and the request does not wait.
        EngineStopped: the engine takes no requests.
        RequestAborted: the deadline passed while it waited for a place.
    """
    arrival = clock.now()
    tokens = estimate_tokens(request.prompt)
    place = await take_place(system, request.params.n, tokens, wait=request.wait, deadline=request.deadline)
    return await hand_over(system, config, place, arrival, request)


async def hand_over(
    system: System,
    config: StreamConfig,
    place: Place,
    arrival: float,
    request: Submission,
    on_wake: Callable[[LocalOutbox], None] | None = None,
) -> LocalOutbox:
    """Start a request that has a place. The place is left however this ends.

    Args:
        arrival: seconds on the engine's clock.
        on_wake: called when there is something to read, also before this returns.

    Raises:
        EngineStopped: the engine takes no requests.
    """
    budget = config.stream_budget_tokens if request.streaming else None
    outbox = system.requests.add(place, arrival, budget, on_wake)
    message = PrepareRequest(
        request=outbox.request,
        request_id=request.request_id,
        arrival=arrival,
        prompt=request.prompt,
        params=request.params,
        outbox=outbox,
        streaming=request.streaming,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        deadline=None if request.deadline is None else arrival + request.deadline,
    )
    try:
        await system.intake.put(message)
    except MailboxClosed:
        raise _leave(outbox, system.error("the engine was closed")) from None
    except BaseException:
        outbox.abort()  # accepted or not, nobody will read it
        _leave(outbox, RequestAborted("the caller left"))
        raise
    return outbox


async def take_place(
    system: System, sequences: int, tokens: int, *, wait: bool, deadline: float | None = None
) -> Place:
    """Room for a request of so many sequences and about so many prompt tokens.

    Args:
        wait: wait in line for it, `deadline` seconds at most, instead of being refused.

    Raises:
        EngineOverloaded: no place, and the request does not wait.
        EngineStopped: the engine takes no requests.
        RequestAborted: the deadline passed while it waited.
    """
    admission: Admission = system.admission
    try:
        if not wait:
            return admission.enter(sequences, tokens)
        with anyio.move_on_after(deadline):
            return await admission.wait(sequences, tokens)
    except TroupeError as error:
        reason = "overloaded" if isinstance(error, EngineOverloaded) else "stopped"
        _count_rejection(system, reason)
        if system.failure is not None:
            raise system.error("the engine was closed") from system.failure
        raise
    _count_rejection(system, "deadline")
    raise RequestAborted("the deadline passed before there was a place", code="deadline_exceeded")


def _leave(outbox: LocalOutbox, error: TroupeError) -> TroupeError:
    outbox.fail(error)
    return error


def _count_rejection(system: System, reason: str) -> None:
    if not system.metrics.closed:
        system.metrics.offer(RequestRejected(reason))
