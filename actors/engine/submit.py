"""The way in: a place, an outbox, and the request on its way to the input processor."""

from collections.abc import Callable

import anyio

from troupellm.actors.admission.admission import AdmissionSlot
from troupellm.actors.admission.prompts import demand_of
from troupellm.actors.engine.system import System
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.runtime.mailbox import MailboxClosed
from troupellm.actors.runtime.ports import Clock
from troupellm.protocol.config.engine import StreamConfig
from troupellm.protocol.errors import (
    EngineOverloaded,
    InvalidRequest,
    ModelNotFound,
    QueueTimeout,
    RateLimited,
    RequestAborted,
    TroupeError,
)
from troupellm.protocol.messages.input import ChatPrompt, Demand, PrepareRequest, Submission
from troupellm.protocol.messages.metrics import RequestRejected
from troupellm.protocol.quota import Quota


async def submit(system: System, clock: Clock, config: StreamConfig, request: Submission) -> LocalOutbox:
    """Hand a request over; returns where its answer will come out.

    Raises:
        EngineOverloaded: no place, and the request does not wait.
        EngineStopped: the engine takes no requests.
        RateLimited: the tenant has reached a limit of its own.
        QueueTimeout: the deadline passed while it waited for a place.
    """
    arrival = clock.now()
    slot = await take_slot(system, demand_of(request), wait=request.wait, deadline=request.deadline)
    return await hand_over(system, config, slot, arrival, request)


async def hand_over(
    system: System,
    config: StreamConfig,
    slot: AdmissionSlot,
    arrival: float,
    request: Submission,
    on_wake: Callable[[LocalOutbox], None] | None = None,
    *,
    expires: bool = True,
) -> LocalOutbox:
    """Start a request that has a place. The place is left however this ends.

    Args:
        arrival: seconds on the engine's clock.
        on_wake: called when there is something to read, also before this returns.
        expires: it may wait to begin no longer than any may; otherwise as long as it wants itself.

    Raises:
        EngineStopped: the engine takes no requests.
        ModelNotFound: the request names an adapter, and none are served.
    """
    deadline = system.queue_deadline(request.deadline) if expires else request.deadline
    budget = config.stream_budget_tokens if request.streaming else None
    outbox = system.requests.add(slot, arrival, budget, on_wake, request.request_id)
    message = PrepareRequest(
        request=outbox.request,
        submission=request,
        outbox=outbox,
        arrival=arrival,
        deadline=None if deadline is None else arrival + deadline,
    )
    try:
        if isinstance(request.prompt, ChatPrompt) and request.prompt.media:
            await system.require_media(request.prompt).put(message)
        elif request.adapter:
            await system.require_adapters(request.adapter).put(message)
        else:
            await system.intake.put(message)
    except (ModelNotFound, InvalidRequest) as error:
        raise _leave(outbox, error) from None
    except MailboxClosed:
        raise _leave(outbox, system.error("the engine was closed")) from None
    except BaseException:
        outbox.abort()  # accepted or not, no reader will take its chunks
        _leave(outbox, RequestAborted("the caller left"))
        raise
    return outbox


def charge(system: System, tenant: str, tokens: int) -> Quota | None:
    """Take a request that generates nothing from a tenant's limits per minute; what is left of them.

    Args:
        tokens: of its text, as far as is known.

    Raises:
        RateLimited: the tenant has reached a limit; nothing was taken.
    """
    quotas = system.admission.quotas
    try:
        quotas.check(tenant, requests=1, sequences=0, tokens=tokens)
    except RateLimited as error:
        count_rejection(system, _reason(error))
        raise
    return quotas.take(tenant, requests=1, sequences=0, tokens=tokens)


async def take_slot(
    system: System, demand: Demand, *, wait: bool, deadline: float | None = None, expires: bool = True
) -> AdmissionSlot:
    """Room for a request.

    Args:
        wait: wait in line for it, `deadline` seconds at most, instead of being refused.
        expires: see `hand_over`.

    Raises:
        RateLimited: the tenant has reached a limit of its own.
        EngineOverloaded: no place, and the request does not wait.
        EngineStopped: the engine takes no requests.
        QueueTimeout: the deadline passed while it waited.
    """
    try:
        if not wait:
            return system.admission.enter(demand)
        with anyio.move_on_after(system.queue_deadline(deadline) if expires else deadline):
            return await system.admission.wait(demand)
    except TroupeError as error:
        count_rejection(system, _reason(error))
        if system.failure is not None:
            raise system.error("the engine was closed") from system.failure
        raise
    count_rejection(system, "deadline")
    raise QueueTimeout("the deadline passed before there was a place")


def _reason(error: TroupeError) -> str:
    if isinstance(error, RateLimited):
        return "rate_limit"
    return "overloaded" if isinstance(error, EngineOverloaded) else "stopped"


def _leave(outbox: LocalOutbox, error: TroupeError) -> TroupeError:
    outbox.fail(error)
    return error


def count_rejection(system: System, reason: str) -> None:
    """A request was refused before the engine had it."""
    if not system.metrics.closed:
        system.metrics.offer(RequestRejected(reason))
