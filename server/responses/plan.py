"""What is known of a response before it is generated: the conversation, the chat request, the answer's frame."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.openai import ChatRequest
from troupellm.protocol.response_objects import ReasoningEcho, ResponseObject
from troupellm.protocol.responses import ResponsesRequest
from troupellm.server.body import INLINE_BYTES, is_large
from troupellm.server.errors import HttpError
from troupellm.server.exchange import Exchange
from troupellm.server.host import EngineHost
from troupellm.server.offload import offload
from troupellm.server.owner import owner_of
from troupellm.server.relabel import Names
from troupellm.server.responses.builder import response_of_item
from troupellm.server.responses.items import as_items, item_type
from troupellm.server.responses.store import ResponseStore, StoredResponse
from troupellm.server.responses.translate import Translated, translate

MAX_TURNS = 1_000
"""Responses that one conversation may be made of, and that the references of one request may name."""

Items = list[dict[str, Any]]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    chat: ChatRequest
    names: Names
    """See `relabel`."""
    frame: ResponseObject
    """The response as long as nothing has been generated."""
    items: Items
    """The request's own input, each with an id."""
    background: bool
    streaming: bool


async def make_plan(host: EngineHost, exchange: Exchange, request: ResponsesRequest) -> Plan:
    """
    Raises:
        InvalidRequest: names the field, as this API calls it.
        ModelNotFound: the model is not served here.
        HttpError: 404, the request refers to an item that is not there.
    """
    engine = host.require()
    model = host.check_model(request.model)
    keep = _keeps(host.responses, request)
    owner = owner_of(exchange)
    name = f"resp_{secrets.token_hex(16)}"
    past = await _past(host.responses, owner, request.previous_response_id)
    own = await _resolved(host.responses, owner, as_items(request.input))

    def work() -> tuple[Translated, Items]:
        before = [item for stored in past for item in (*_decoded(stored.items), *_output(stored))]
        return translate(request, [*before, *own], first=len(before)), _identified(own, name)

    large = is_large(exchange) or sum(len(stored.items) + len(stored.body) for stored in past) > INLINE_BYTES
    translated, items = await offload(work) if large else work()
    text, reasoning = request.text, request.reasoning
    given = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
    frame = ResponseObject(
        id=name,
        created_at=host.now(),
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
        temperature=_given_or_default(request.temperature, engine.defaults.get("temperature")),
        text={"format": {"type": "text"} if text is None or text.format is None else text.format} | given,
        tool_choice=translated.tools.choice,
        tools=translated.tools.kept,
        top_logprobs=request.top_logprobs or 0,
        top_p=_given_or_default(request.top_p, engine.defaults.get("top_p")),
        truncation=request.truncation or "disabled",
        user=request.user,
    )
    return Plan(
        owner=owner,
        chat=translated.chat,
        names=translated.names,
        frame=frame,
        items=items,
        background=bool(request.background),
        streaming=bool(request.stream),
    )


def _keeps(store: ResponseStore, request: ResponsesRequest) -> bool:
    """Whether the response is to be kept.

    Raises:
        InvalidRequest: it has to be, and cannot.
    """
    if request.background and request.store is False:
        raise InvalidRequest("background needs store: true", param="background")
    if not store.enabled:
        for field in ("background", "previous_response_id", "store"):
            if getattr(request, field):
                raise no_store(field)
    return store.enabled and request.store is not False


def no_store(field: str) -> InvalidRequest:
    message = (
        f"{field}: this server keeps no responses; it does with --responses-store-entries above 0 and, where "
        "--api-server-count is above 1, --responses-store"
    )
    return InvalidRequest(message, param=field, code="unsupported_parameter")


async def _past(store: ResponseStore, owner: str, name: str | None) -> list[StoredResponse]:
    """The responses that a request goes on from, oldest first."""
    param = "previous_response_id"
    if name is None:
        return []
    try:
        past = await store.chain(owner, name, MAX_TURNS)
    except KeyError as error:
        gone = "" if error.args[0] == name else ": a response before it is not kept any more"
        message = f"{param}: no response with this id is kept here{gone}"
        raise InvalidRequest(message, param=param, code="previous_response_not_found") from None
    except OverflowError:
        raise InvalidRequest(f"{param}: more than {MAX_TURNS} responses before this one", param=param) from None
    if any(stored.running for stored in past):
        raise InvalidRequest(f"{param}: this response is not finished yet", param=param)
    return past


async def _resolved(store: ResponseStore, owner: str, items: Items) -> Items:
    """The items with those in place of references that they refer to."""
    known: dict[str, dict[str, dict[str, Any]]] = {}
    resolved = []
    for position, item in enumerate(items):
        if item_type(item) != "item_reference":
            resolved.append(item)
            continue
        wanted = str(item.get("id"))
        response = response_of_item(wanted) or ""
        if response not in known:
            if len(known) >= MAX_TURNS:
                raise InvalidRequest(f"input refers to items of more than {MAX_TURNS} responses", param="input")
            stored = await store.get(owner, response) if response and store.enabled else None
            found = [] if stored is None else [*_decoded(stored.items), *_output(stored)]
            known[response] = {one["id"]: one for one in found}
        if wanted not in known[response]:
            message = f"input[{position}]: no item with this id is kept here"
            error = HttpError(404, message, code="item_not_found")
            error.param = f"input[{position}].id"
            raise error
        resolved.append(known[response][wanted])
    return resolved


def _identified(items: Items, response_id: str) -> Items:
    """The items, each with an id; see `builder.item_id` for those of the output."""
    suffix = response_id.removeprefix("resp_")
    return [
        item if isinstance(item.get("id"), str) else item | {"id": f"in_{suffix}{position:04x}"}
        for position, item in enumerate(items)
    ]


def _decoded(items: bytes) -> Items:
    return msgspec.json.decode(items, type=Items)


def _output(stored: StoredResponse) -> Sequence[dict[str, Any]]:
    output: Items = msgspec.json.decode(stored.body).get("output") or []
    return output


def _given_or_default(given: float | None, default: object) -> float:
    if given is not None:
        return given
    return float(default) if isinstance(default, int | float) else 1.0
