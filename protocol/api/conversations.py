"""Bodies of the conversations API: a conversation that the server keeps, and the items in it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.api.open_schemas import InputItem

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class CreateConversation(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations."""

    items: list[InputItem] | None = None
    metadata: Metadata | None = None


class UpdateConversation(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class AddItems(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[InputItem], Meta(min_length=1)]


class ConversationReference(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(max_length=128)]


class ConversationObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    """Epoch seconds."""
    metadata: dict[str, str] = {}


class DeletedConversation(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ConversationItems(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
