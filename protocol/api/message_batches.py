"""Bodies of /v1/messages/batches, as Anthropic's API has them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_PAGE = 1_000


class BatchedMessage(msgspec.Struct, frozen=True, kw_only=True):
    # A pattern's $ alone lets a line feed at the end pass.
    custom_id: Annotated[str, Meta(pattern=r"^(?!.*\n)[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]
    """Body of POST /v1/messages."""


class MessageBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1)]


class MessageBatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """All requests are processing until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    """Times are those of RFC 3339."""
    expires_at: str
    ended_at: str | None = None
    cancel_initiated_at: str | None = None
    archived_at: str | None = None
    results_url: str | None = None
    """A path of this server, once the batch has ended."""


class MessageBatchList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class MessageBatchesQuery(msgspec.Struct, frozen=True, kw_only=True):
    after_id: str | None = None
    """The list, newest first, begins behind this batch."""
    before_id: str | None = None
    """It ends before this one."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
