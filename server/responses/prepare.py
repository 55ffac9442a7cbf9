"""A response before it is generated: the conversation, the chat request, the answer's frame."""

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.api.conversations import ConversationReference
from troupellm.protocol.api.open_schemas import SKIPPED_ITEMS
from troupellm.protocol.api.response_objects import ReasoningEcho, ResponseObject
from troupellm.protocol.api.responses import ResponsesRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.translated import Names
from troupellm.server.responses.conversation import conversation_id, gather
from troupellm.server.responses.items import item_type
from troupellm.server.responses.namespaces import Namespaced
from troupellm.server.responses.sealed import is_sealed
from troupellm.server.responses.translate import ENCRYPTED, Translated, translate
from troupellm.server.storage.responses import ResponseStore
from troupellm.server.storage.responses_rows import Items


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    chat: ChatRequest
    names: Names
    """See `relabel`."""
    namespaced: Namespaced
    """The functions behind the model's names of functions in namespaces."""
    frame: ResponseObject
    """The response as long as nothing has been generated."""
    items: Items
    """The request's own input, each with an id."""
    background: bool
    streaming: bool
    sealing: bool
    """Reasoning comes with an `encrypted_content`, for clients that send back nothing else of it."""
    border: int
    """How many of the oldest turns are left out of the prompt."""


async def make_plan(host: ServerState, exchange: Exchange, request: ResponsesRequest) -> Plan:
    """
    Raises:
        InvalidRequest: names the field, as this API calls it.
        ModelNotFound: the model is not served here.
        HttpError: 404, the request refers to an item that is not there.
    """
    defaults = host.require().defaults
    model = await host.check_model(exchange, request.model)
    keep = _keeps(host.responses, request)
    kept = conversation_id(request)
    owner = exchange.owner
    name = f"resp_{secrets.token_hex(16)}"
    conversation = await gather(host, exchange, request, owner)

    def work() -> tuple[Translated, Items]:
        before, own, room = conversation.items()
        return translate(request, [*before, *own], first=len(before), room=room), _identified(own, name)

    packed = any(is_sealed(item.get("encrypted_content")) for item in conversation.own)
    await exchange.add_bytes(conversation.stored_bytes, host.config.body_timeout)
    if conversation.stored_bytes:
        translated, items = await offload(work, limiter=host.responses.decoding)
    else:
        translated, items = await offload(work) if packed or is_large(exchange) else work()
    await exchange.add_bytes(translated.unpacked, host.config.body_timeout)
    host.skipped.report(exchange, translated.skipped)
    frame = _frame(request, translated, host.now(), defaults, name=name, model=model, kept=kept, keep=keep)
    return Plan(
        owner=owner,
        chat=translated.chat,
        names=translated.names,
        namespaced=translated.tools.namespaced,
        frame=frame,
        items=items,
        background=bool(request.background),
        streaming=bool(request.stream),
        sealing=ENCRYPTED in (request.include or []),
        border=conversation.border,
    )


def _frame(
    request: ResponsesRequest,
    translated: Translated,
    created_at: int,
    defaults: Mapping[str, Any],
    *,
    name: str,
    model: str,
    kept: str | None,
    keep: bool,
) -> ResponseObject:
    """The response before its first token.

    Args:
        defaults: of sampling parameters.
        kept: the conversation that it belongs to.
        keep: whether the response is to be kept.
    """
    text, reasoning = request.text, request.reasoning
    given = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
    return ResponseObject(
        id=name,
        conversation=None if kept is None else ConversationReference(id=kept),
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningEcho() if reasoning is None else ReasoningEcho(reasoning.effort, reasoning.summary),
        safety_identifier=request.safety_identifier,
        store=keep,
        temperature=_given_or_default(request.temperature, defaults.get("temperature")),
        text={"format": {"type": "text"} if text is None or text.format is None else text.format} | given,
        tool_choice=translated.tools.choice,
        tools=translated.tools.kept,
        top_logprobs=request.top_logprobs or 0,
        top_p=_given_or_default(request.top_p, defaults.get("top_p")),
        truncation=request.truncation or "disabled",
        user=request.user,
    )


def _keeps(store: ResponseStore, request: ResponsesRequest) -> bool:
    """Whether the response is to be kept.

    Raises:
        InvalidRequest: it has to be, and cannot.
    """
    if request.background and request.store is False:
        raise InvalidRequest("background needs store: true", param="background")
    if request.conversation is not None and request.previous_response_id is not None:
        raise InvalidRequest("conversation and previous_response_id exclude each other", param="conversation")
    if not store.enabled:
        for field in ("background", "previous_response_id", "conversation", "store"):
            if getattr(request, field):
                raise no_store(field)
    return store.enabled and request.store is not False


def no_store(field: str) -> InvalidRequest:
    message = (
        f"{field}: this server keeps no responses; it does with --responses-store-entries above 0 and, where "
        "--api-server-count is above 1, --responses-store"
    )
    return InvalidRequest(message, param=field, code="unsupported_parameter")


def _identified(items: Items, response_id: str) -> Items:
    """The items as they are kept, each with an id; see `builder.item_id` for those of the output.

    Items that are unreadable here are not kept; a mark of each is.
    """
    suffix = response_id.removeprefix("resp_")
    kept = []
    for position, item in enumerate(items):
        if item_type(item) in SKIPPED_ITEMS:
            item = {field: item[field] for field in ("type", "id", "status") if isinstance(item.get(field), str)}
        kept.append(item if isinstance(item.get("id"), str) else item | {"id": f"in_{suffix}{position:04x}"})
    return kept


def _given_or_default(given: float | None, default: object) -> float:
    if given is not None:
        return given
    return float(default) if isinstance(default, int | float) else 1.0
