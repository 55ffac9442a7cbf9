"""Pages of items: what a response was made from, and what a conversation holds."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.responses.items import item_type
from troupellm.server.storage.responses_rows import Items


class ItemsQuery(msgspec.Struct, kw_only=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[str] | None = None


def page_of(items: Items, query: ItemsQuery, whole: str) -> tuple[Items, bool]:
    """The items that a query asks for, and whether more follow.

    Args:
        items: oldest first, each with an id.
        whole: what they are items of, for errors.

    Raises:
        InvalidRequest: `after` names none of them.
    """
    ordered = items[::-1] if query.order == "desc" else items
    if query.after is not None:
        places = [position for position, item in enumerate(ordered) if item["id"] == query.after]
        if not places:
            raise InvalidRequest(f"after is not the id of an item of this {whole}", param="after")
        ordered = ordered[places[0] + 1 :]
    return ordered[: query.limit], len(ordered) > query.limit


def shown(item: dict[str, Any]) -> dict[str, Any]:
    """An input item with what its sender may leave out."""
    if item_type(item) != "message":
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    content = item.get("content")
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
    return item | {"type": "message", "content": parts}
