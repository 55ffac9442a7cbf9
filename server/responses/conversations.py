"""/v1/conversations: conversations that the server keeps, and what a response takes from one and adds to it."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from troupellm.protocol.api.conversations import (
    AddItems,
    ConversationItems,
    ConversationObject,
    CreateConversation,
    DeletedConversation,
    UpdateConversation,
)
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import INLINE_BYTES
from troupellm.server.base.errors import HttpError, not_ready
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.responses.conversation import no_conversation
from troupellm.server.responses.items import MAX_ITEMS, item_type
from troupellm.server.responses.listing import ItemsQuery, page_of, shown
from troupellm.server.responses.prepare import no_store
from troupellm.server.storage.conversation_rows import (
    ConversationFullError,
    add_conversation,
    append_items,
    change_metadata,
    remove_item,
)
from troupellm.server.storage.responses import ResponseStore
from troupellm.server.storage.responses_rows import Items, StoredResponse, read_row

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


async def create(host: ServerState, exchange: Exchange, request: CreateConversation) -> None:
    store = _store(host)
    name = f"conv_{secrets.token_hex(16)}"
    made = ConversationObject(id=name, created_at=host.now(), metadata=request.metadata or {})
    items, body = _given(request.items or []), msgspec.json.encode(made)
    with _bounded():
        kept = await store.transact(
            lambda database: add_conversation(database, exchange.owner, name, body, items, store.bounds)
        )
    if not kept:
        raise not_ready("there is no room to keep the conversation now", code="server_is_overloaded")
    await exchange.respond(200, body)


async def retrieve(host: ServerState, exchange: Exchange, _: None) -> None:
    await exchange.respond(200, (await _find(host, exchange)).body)


async def update(host: ServerState, exchange: Exchange, request: UpdateConversation) -> None:
    store, name = _store(host), _name(exchange)
    body = await store.transact(
        lambda database: change_metadata(database, exchange.owner, name, request.metadata or {}, store.bounds)
    )
    if body is None:
        raise no_conversation()
    await exchange.respond(200, body)


async def delete(host: ServerState, exchange: Exchange, _: None) -> None:
    if not await _store(host).delete(exchange.owner, _name(exchange), conversation=True):
        raise no_conversation()
    await exchange.respond(200, msgspec.json.encode(DeletedConversation(id=_name(exchange))))


async def add_items(host: ServerState, exchange: Exchange, request: AddItems) -> None:
    store, items = _store(host), _given(request.items)
    with _bounded():
        found = await store.transact(
            lambda database: append_items(database, exchange.owner, _name(exchange), items, store.bounds)
        )
    if not found:
        raise no_conversation()
    await exchange.respond(200, msgspec.json.encode(_listed(items, has_more=False)))


async def list_items(host: ServerState, exchange: Exchange, _: None) -> None:
    query: ItemsQuery = exchange.query
    page, has_more = page_of(await _items(host, exchange), query, "conversation")
    await exchange.respond(200, msgspec.json.encode(_listed(page, has_more=has_more)))


async def retrieve_item(host: ServerState, exchange: Exchange, _: None) -> None:
    name = exchange.path_values["item_id"]
    item = next((item for item in await _items(host, exchange) if item["id"] == name), None)
    if item is None:
        raise _item_not_found()
    await exchange.respond(200, msgspec.json.encode(item))


async def delete_item(host: ServerState, exchange: Exchange, _: None) -> None:
    store, item = _store(host), exchange.path_values["item_id"]
    body, found = await store.transact(
        lambda database: remove_item(database, exchange.owner, _name(exchange), item, store.bounds)
    )
    if body is None:
        raise no_conversation()
    if not found:
        raise _item_not_found()
    await exchange.respond(200, body)


def _item_not_found() -> HttpError:
    return HttpError(404, "the conversation has no item with this id", code="item_not_found")


@contextmanager
def _bounded() -> Iterator[None]:
    """A conversation that would be too large is a fault of the items."""
    try:
        yield
    except ConversationFullError as error:
        raise InvalidRequest(f"items: {error}", param="items", code="request_too_large") from None


def _store(host: ServerState) -> ResponseStore:
    if not host.responses.enabled:
        raise no_store("conversation")
    return host.responses


def _name(exchange: Exchange) -> str:
    return exchange.path_values["conversation_id"]


async def _find(host: ServerState, exchange: Exchange) -> StoredResponse:
    name = _name(exchange)
    stored = await _store(host).transact(lambda database: read_row(database, exchange.owner, name, conversation=True))
    if stored is None:
        raise no_conversation()
    return stored


async def _items(host: ServerState, exchange: Exchange) -> Items:
    stored = await _find(host, exchange)
    read = partial(msgspec.json.decode, stored.items, type=Items)
    items: Items = read() if len(stored.items) <= INLINE_BYTES else await offload(read, limiter=host.responses.decoding)
    return items


def _given(items: Sequence[Mapping[str, Any]]) -> Items:
    """The items of a request as they are kept.

    Raises:
        InvalidRequest: there are too many, or one only refers to another item.
    """
    for place, item in enumerate(items):
        if item_type(item) == "item_reference":
            param = f"items[{place}]"
            raise InvalidRequest(f"{param}: a conversation takes items, not an item_reference", param=param)
    return identified(items)


def identified(items: Sequence[Mapping[str, Any]]) -> Items:
    """The items as they are kept: each with an id of the server's.

    Raises:
        InvalidRequest: there are too many.
    """
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"items must have at most {MAX_ITEMS} entries, got {len(items)}", param="items")
    token = secrets.token_hex(16)
    return [
        shown(dict(item) | {"id": f"{_PREFIXES.get(item_type(item), 'item')}_{token}{place:04x}"})
        for place, item in enumerate(items)
    ]


def _listed(items: Items, *, has_more: bool) -> ConversationItems:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ConversationItems(data=items, first_id=first, last_id=last, has_more=has_more)
