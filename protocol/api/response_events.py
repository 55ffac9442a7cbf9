"""Events of a streamed response. Each has a type, which is also the event's name, and a number that rises by one."""

import msgspec

from troupellm.protocol.api.response_objects import ContentPart, LogprobEntry, OutputItem, ResponseObject


class ResponseEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0


class _OfItem(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, kw_only=True):
    content_index: int = 0


class _OfResponse(ResponseEvent, kw_only=True):
    response: ResponseObject


class ResponseQueued(_OfResponse, tag="response.queued"):
    pass


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


class OutputItemAdded(ResponseEvent, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(ResponseEvent, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ContentPartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    part: ContentPart


class ContentPartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    part: ContentPart


class OutputTextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[LogprobEntry] = []


class OutputTextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[LogprobEntry] = []


class ReasoningTextDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class FunctionCallArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class FunctionCallArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class ErrorEvent(ResponseEvent, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


EVENTS: tuple[type[ResponseEvent], ...] = (
    ResponseQueued,
    ResponseCreated,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    ContentPartDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    ErrorEvent,
)
