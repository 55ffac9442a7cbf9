"""Files and batches, as OpenAI's API has them, and the lines of a batch's files."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OVER: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})
"""Statuses in which nothing happens any more."""
MAX_METADATA = 16
MAX_CUSTOM_ID = 512
SHORTEST_LIFE, LONGEST_LIFE = 3600, 30 * 24 * 3600
"""Seconds after which a file may be asked to expire."""

Order = Literal["asc", "desc"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FilesQuery(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    """The list begins behind this file."""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    order: Order = "desc"
    purpose: str | None = None


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=SHORTEST_LIFE, le=LONGEST_LIFE)]


class FileForm(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a form that uploads a file, beside the file. The last two come together or not at all."""

    purpose: Literal["batch"]
    anchor: Literal["created_at"] | UnsetType = msgspec.field(name="expires_after[anchor]", default=UNSET)
    seconds: Annotated[int, Meta(ge=SHORTEST_LIFE, le=LONGEST_LIFE)] | UnsetType = msgspec.field(
        name="expires_after[seconds]", default=UNSET
    )


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: Annotated[str, Meta(max_length=128)]
    """Path of the route that answers all lines."""
    # A pattern's $ alone lets a line feed at the end pass, here as in the others.
    completion_window: Annotated[str, Meta(pattern=r"^(?!.*\n)[1-9][0-9]{0,3}[smhd]$")]
    """Lines without an answer by then expire: a number and s, m, h or d."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """From 1."""


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchesQuery(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    """The list begins behind this batch."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


# Lines.


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: Literal["POST"] = "POST"
    url: Annotated[str, Meta(max_length=256)]
    body: msgspec.Raw


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: Any
    """JSON."""


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    line: int | None = None
    """From 1; where the line has no custom_id that could be repeated."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output file (status 200) or of the error file (all else)."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineError | None = None
