"""Stored responses that a request uses: those before it, and the items that it refers to.

A short request may ask for much, so all of it together counts as if the client had sent it: at most `max_body_bytes`,
which is looked at before anything is read, and again before a reference puts an item into the conversation once more.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from troupellm.protocol.api.responses import ResponsesRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import declared_bytes
from troupellm.server.base.errors import HttpError
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState
from troupellm.server.responses.builder import response_of_item
from troupellm.server.responses.items import as_items, item_type
from troupellm.server.storage.kept_items import after_compaction
from troupellm.server.storage.responses import ResponseStore, TooMuchError
from troupellm.server.storage.responses_rows import Items, StoredResponse

MAX_TURNS = 1_000
"""Responses that one conversation may be made of, and that the references of one request may name."""
_PREVIOUS = "previous_response_id"
_CONVERSATION = "conversation"
_REFERENCE = "item_reference"


class Conversation(msgspec.Struct, frozen=True):
    """Where the items of a conversation are, none of them decoded yet."""

    own: Items
    past: Sequence[StoredResponse]
    """Oldest first."""
    referred: Mapping[str, StoredResponse]
    """By id; those that are there."""
    room: int
    """Bytes that items may have which references put in."""

    @property
    def border(self) -> int:
        """How many of its turns the response before this one has left out."""
        return self.past[-1].border if self.past else 0

    @property
    def stored_bytes(self) -> int:
        return _bytes_of([*self.past, *self.referred.values()])

    def items(self) -> tuple[Items, Items, int]:
        """The items before the request, its own with those in place of references that they refer to, and the bytes
        of `room` that are left. Slow.

        References to items that are not kept, or not any more, stay.

        Raises:
            InvalidRequest: the references bring in too much.
        """
        before = after_compaction([item for stored in self.past for item in _items_of(stored)])
        known = {item["id"]: item for stored in self.referred.values() for item in _items_of(stored)}
        sizes: dict[str, int] = {}
        own, room = [], self.room
        for item in self.own:
            name = str(item.get("id"))
            if item_type(item) != _REFERENCE or name not in known:
                own.append(item)
                continue
            if name not in sizes:
                sizes[name] = len(msgspec.json.encode(known[name]))
            room -= sizes[name]
            if room < 0:
                raise _too_much("input", "the items that it refers to")
            own.append(known[name])
        return before, own, room


async def gather(host: ServerState, exchange: Exchange, request: ResponsesRequest, owner: str) -> Conversation:
    """
    Raises:
        InvalidRequest: too much of it, or the response before it is not there or not finished.
        HttpError: 503, the store cannot be read; 404, the conversation is not there.
    """
    room = host.config.max_body_bytes - _declared(exchange)
    past = await _past(host.responses, owner, request.previous_response_id, room)
    kept = conversation_id(request)
    if kept is not None:
        past = [await _conversation(host.responses, owner, kept, room)]
    room -= _bytes_of(past)
    own = as_items(request.input)
    referred: Mapping[str, StoredResponse] = {}
    wanted = {response_of_item(str(item.get("id"))): None for item in own if item_type(item) == _REFERENCE}
    names = [name for name in wanted if name is not None]
    if len(names) > MAX_TURNS:
        raise InvalidRequest(f"input refers to items of more than {MAX_TURNS} responses", param="input")
    if names and host.responses.enabled:
        try:
            referred = await host.responses.several(owner, names, room)
        except TooMuchError:
            raise _too_much("input", "the responses that it refers to") from None
    return Conversation(own, past, referred, room)


def conversation_id(request: ResponsesRequest) -> str | None:
    """The id of the conversation that the request names."""
    given = request.conversation
    return given if isinstance(given, str | None) else given.id


async def _conversation(store: ResponseStore, owner: str, name: str, room: int) -> StoredResponse:
    """
    Raises:
        HttpError: 404, it is not there.
        InvalidRequest: it is too large.
    """
    try:
        stored = await store.conversation(owner, name, room)
    except TooMuchError:
        raise _too_much(_CONVERSATION, "the items of the conversation") from None
    if stored is None:
        raise no_conversation()
    return stored


def no_conversation() -> HttpError:
    error = HttpError(404, "no conversation with this id is kept here", code="conversation_not_found")
    error.param = _CONVERSATION
    return error


async def _past(store: ResponseStore, owner: str, name: str | None, room: int) -> Sequence[StoredResponse]:
    if name is None:
        return ()
    try:
        past = await store.chain(owner, name, MAX_TURNS, room)
    except KeyError as error:
        gone = "" if error.args[0] == name else ": a response before it is not kept any more"
        message = f"{_PREVIOUS}: no response with this id is kept here{gone}"
        raise InvalidRequest(message, param=_PREVIOUS, code="previous_response_not_found") from None
    except OverflowError:
        message = f"{_PREVIOUS}: more than {MAX_TURNS} responses before this one; {_REMEDIES[_PREVIOUS]}"
        raise InvalidRequest(message, param=_PREVIOUS) from None
    except TooMuchError:
        raise _too_much(_PREVIOUS, "the responses before this one") from None
    if any(stored.running for stored in past):
        raise InvalidRequest(f"{_PREVIOUS}: this response is not finished yet", param=_PREVIOUS)
    return past


def _declared(exchange: Exchange) -> int:
    """Bytes of the body, as far as its head tells; a body without a length is bounded by itself."""
    return declared_bytes(exchange) or 0


_REMEDIES: Final = {
    _CONVERSATION: "delete some of them (DELETE /v1/conversations/{conversation_id}/items/{item_id}), or begin another"
    " conversation with the items that still count",
    _PREVIOUS: "continue an earlier response, or send the items that still count as input",
    "input": "refer to fewer items",
}


def _too_much(param: str, what: str) -> InvalidRequest:
    message = (
        f"{param}: {what} have more bytes together with the request than one may have (--max-body-bytes);"
        f" {_REMEDIES[param]}"
    )
    return InvalidRequest(message, param=param, code="request_too_large")


def _bytes_of(responses: Sequence[StoredResponse]) -> int:
    return sum(stored.size for stored in responses)


class _Answer(msgspec.Struct):
    """The needed fields of a response object; the rest is not decoded."""

    output: Items = []


def _items_of(stored: StoredResponse) -> Items:
    """Input and output of a response."""
    items = msgspec.json.decode(stored.items, type=Items)
    return [*items, *msgspec.json.decode(stored.body, type=_Answer).output]
