"""The shared part of whole, streamed and background responses."""

from contextlib import suppress

import msgspec

from troupellm.protocol.api.chat import ErrorObject
from troupellm.protocol.api.response_events import ResponseEvent
from troupellm.protocol.api.response_objects import CompactionItem, ResponseObject
from troupellm.protocol.errors import TroupeError
from troupellm.server.base.errors import HttpError, answer, flatten
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.relabel import relabel
from troupellm.server.responses.builder import ResponseBuilder
from troupellm.server.responses.conversations import identified
from troupellm.server.responses.prepare import Plan
from troupellm.server.storage.conversation_rows import ConversationFullError, append_items
from troupellm.server.storage.kept_items import COMPACTION
from troupellm.server.storage.responses import ResponseStore
from troupellm.server.storage.responses_rows import Items, StoredResponse


def failure(builder: ResponseBuilder, plan: Plan, error: BaseException) -> list[ResponseEvent]:
    """The events of an answer that has failed with any error."""
    error = flatten(error)
    error_answer = answer(relabel(error, plan.names) if isinstance(error, TroupeError) else error, shape="responses")
    shown = msgspec.convert(msgspec.json.decode(error_answer.body)["error"], ErrorObject)
    return builder.fail(error_answer.status, shown.code, shown.message, shown.param)


async def keep(host: ServerState, exchange: Exchange, plan: Plan, response: ResponseObject) -> ResponseObject:
    """Add an answer to its conversation and store it, where it is to be; what comes back says whether it was."""
    store, response = host.responses, await joined(host, exchange, plan, response)
    if not response.store:
        return response
    kept = False
    with suppress(HttpError):  # the answer is there: it is not lost over the place where it should be kept
        kept = await store.put(plan.owner, stored_form(plan, response))
    return response if kept else msgspec.structs.replace(response, store=False)


async def joined(host: ServerState, exchange: Exchange, plan: Plan, response: ResponseObject) -> ResponseObject:
    """Add an answer and its input to the conversation that it belongs to; a failed answer leaves it as it was.

    A turn that finds no room there is named in the answer's header, where the answer has not begun.
    """
    if response.conversation is None or response.status not in ("completed", "incomplete"):
        return response
    items = [*identified(plan.items), *msgspec.to_builtins(response.output)]
    fits = False
    with suppress(HttpError):  # as above
        fits = await _added(host.responses, plan.owner, response.conversation.id, items)
    if fits:
        return response
    host.skipped.report(exchange, ["turn conversation"])
    return msgspec.structs.replace(response, conversation=None)


def _is_compacted(plan: Plan, response: ResponseObject) -> bool:
    """Whether the turns that `truncation: auto` has left out are gone from the conversation that is kept."""
    own = any(item.get("type") == COMPACTION for item in plan.items)
    return own or any(isinstance(item, CompactionItem) for item in response.output)


async def _added(store: ResponseStore, owner: str, name: str, items: Items) -> bool:
    """Put items behind those of a conversation; False where it is gone, or has no room for them.

    Raises:
        HttpError: 503, the store cannot be written.
    """
    try:
        return await store.transact(lambda database: append_items(database, owner, name, items, store.bounds))
    except ConversationFullError:
        return False


def stored_form(plan: Plan, response: ResponseObject) -> StoredResponse:
    return StoredResponse(
        id=response.id,
        previous=response.previous_response_id,
        status=response.status,
        background=plan.background,
        logged=plan.background and plan.streaming,
        body=msgspec.json.encode(response),
        items=msgspec.json.encode(plan.items),
        border=0 if _is_compacted(plan, response) else plan.border,
    )
