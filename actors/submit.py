"""The way in: a place, an outbox, and the request on its way to the input processor."""

from collections.abc import Sequence
from typing import cast

import anyio
import msgspec

from troupellm.actors.admission import Admission, Place, estimate_tokens
from troupellm.actors.mailbox import MailboxClosed
from troupellm.actors.outbox import LocalOutbox
from troupellm.actors.ports import Clock
from troupellm.actors.system import System
from troupellm.protocol.config import StreamConfig
from troupellm.protocol.errors import EngineOverloaded, InvalidRequest, RequestAborted, TroupeError
from troupellm.protocol.intake import ChatPrompt, PrepareRequest, Prompt, TextPrompt, TokensPrompt
from troupellm.protocol.metrics import RequestRejected
from troupellm.protocol.sampling import SamplingParams

PromptLike = str | Sequence[int] | Prompt


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks for."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    wait: bool = True
    """Wait for a place instead of being refused."""
    cache_salt: bytes = b""
    deadline: float | None = None
    """Seconds from now until which the request must have been scheduled."""
    streaming: bool = True


def as_prompt(prompt: PromptLike) -> Prompt:
    """Text, token ids, or a prompt as it is.

    Raises:
        InvalidRequest: it is none of them.
    """
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, TextPrompt | TokensPrompt | ChatPrompt):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return TokensPrompt(tuple(cast(Sequence[int], prompt)))
    raise InvalidRequest("prompt must be text or a sequence of token ids", param="prompt", code="invalid_type")


async def submit(system: System, clock: Clock, config: StreamConfig, request: Submission) -> LocalOutbox:
    """Hand a request over; returns where its answer will come out.

    Raises:
        EngineOverloaded: no place, and the request does not wait.
        EngineStopped: the engine takes no requests.
        RequestAborted: the deadline passed while it waited for a place.
    """
    arrival = clock.now()
    place = await _place(system, request)
    outbox = system.requests.add(place, arrival, config.stream_budget_tokens if request.streaming else None)
    message = PrepareRequest(
        request=outbox.request,
        request_id=request.request_id,
        arrival=arrival,
        prompt=request.prompt,
        params=request.params,
        outbox=outbox,
        streaming=request.streaming,
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


async def _place(system: System, request: Submission) -> Place:
    admission: Admission = system.admission
    tokens = estimate_tokens(request.prompt)
    try:
        if not request.wait:
            return admission.enter(request.params.n, tokens)
        with anyio.move_on_after(request.deadline):
            return await admission.wait(request.params.n, tokens)
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
