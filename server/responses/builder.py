"""From the pieces of a chat turn to the output items of a response, and to the events that tell of them.

Answers that are not streamed go the same way with the events left out, so both say the same.
"""

from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from troupellm.protocol.api.chat import ErrorObject
from troupellm.protocol.api.response_events import (
    ContentPartAdded,
    ContentPartDone,
    ErrorEvent,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from troupellm.protocol.api.response_objects import (
    CompactionItem,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    LogprobEntry,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    TopLogprobEntry,
)
from troupellm.protocol.api.usage import OutputTokensDetails
from troupellm.protocol.params.chat_events import CallArguments, CallStart, Content, Finished, Reasoning, TurnEvent
from troupellm.protocol.params.outputs import TokenLogprob, Usage
from troupellm.server.base.errors import OVERLOADED, ErrorAnswer, with_code
from troupellm.server.openai.usage import predictions
from troupellm.server.responses.namespaces import Namespaced
from troupellm.server.responses.sealed import sealed

_PREFIXES = {OutputMessage: "msg", ReasoningItem: "rs", FunctionCall: "fc", CompactionItem: "cmp"}


def item_id(kind: type[OutputItem], response_id: str, position: int) -> str:
    """Unlike that of any other item; it names the response, which is how references to items are found again."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{position:04x}"


def response_of_item(name: str) -> str | None:
    """The id of the response that an item is part of; None where the name is not one of ours."""
    prefix, _, rest = name.partition("_")
    return f"resp_{rest[:-4]}" if prefix in (*_PREFIXES.values(), "in") and len(rest) > 4 else None


def error_event(number: int, answer: ErrorAnswer) -> bytes:
    """An error that ends a stream, as this API's event."""
    shown = msgspec.convert(msgspec.json.decode(answer.body)["error"], ErrorObject)
    return encoded([ErrorEvent(sequence_number=number, code=shown.code, message=shown.message, param=shown.param)])


class ResponseBuilder:
    """Follows one response. Every method gives the events that are new, numbered."""

    def __init__(
        self, response: ResponseObject, namespaced: Namespaced | None = None, *, sealing: bool = False
    ) -> None:
        """
        Args:
            namespaced: what the model's names of functions in namespaces stand for.
            sealing: reasoning comes with an `encrypted_content`; see `sealed`.
        """
        self.response = response
        """Its output is complete once `finish` or `fail` was called."""
        self._namespaced = namespaced or {}
        self._sealing = sealing
        self._number = 0
        self._items: list[OutputItem] = []
        self._texts: list[str] = []
        """Pieces of the open item's text or arguments."""
        self._logprobs: list[LogprobEntry] = []
        self._early: list[LogprobEntry] = []
        """Of the answer's first tokens, whose text comes with later ones: they may be parts of one character."""
        self._open: OutputItem | None = None
        self._reason = "stop"

    def error_event(self, answer: ErrorAnswer) -> bytes:
        return error_event(self._number, answer)

    def begin(self) -> list[ResponseEvent]:
        out: list[ResponseEvent] = [ResponseCreated(response=self.response)]
        if self.response.background:
            out.append(ResponseQueued(response=self.response))
        self.response = msgspec.structs.replace(self.response, status="in_progress")
        return self._numbered([*out, ResponseInProgress(response=self.response)])

    def feed(self, events: Iterable[TurnEvent]) -> list[ResponseEvent]:
        out: list[ResponseEvent] = []
        for event in events:
            match event.piece:
                case Content(text=text):
                    self._text(text, event.logprobs, out)
                case Reasoning(text=text):
                    if text:
                        self._reasoning(text, out)
                case CallStart(id=call_id, name=name):
                    self._call(call_id, name, out)
                case CallArguments(text=text):
                    self._arguments(text, out)
                case Finished(reason=reason):
                    self._reason = reason
        return self._numbered(out)

    def compact(self, encrypted_content: str) -> list[ResponseEvent]:
        """The conversation was compacted, before anything of the answer."""
        item = CompactionItem(id=self._new_id(CompactionItem), encrypted_content=encrypted_content)
        index = len(self._items)
        self._items.append(item)
        return self._numbered(
            [OutputItemAdded(output_index=index, item=item), OutputItemDone(output_index=index, item=item)]
        )

    def finish(self, usage: Usage, now: int) -> list[ResponseEvent]:
        """The answer has ended by itself, or at its limit.

        Args:
            now: epoch seconds.
        """
        out: list[ResponseEvent] = []
        cut = self._reason == "length"
        if not self._items and self._open is None:
            self._enter(OutputMessage(id=self._new_id(OutputMessage)), out)
        self._close(out, "incomplete" if cut else "completed")
        self.response = msgspec.structs.replace(
            self.response,
            status="incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            completed_at=None if cut else now,
            output=self._items,
            usage=usage_of(usage),
        )
        kind = ResponseIncomplete if cut else ResponseCompleted
        return self._numbered([*out, kind(response=self.response)])

    def fail(self, status: int, code: str | None, message: str, param: str | None) -> list[ResponseEvent]:
        """The answer has failed; what came until then stays."""
        out: list[ResponseEvent] = []
        self._close([], "incomplete")
        shown = ResponseError(_failure_code(status, code), with_code(message, code))
        self.response = msgspec.structs.replace(self.response, status="failed", error=shown, output=self._items)
        out += [ErrorEvent(code=code, message=message, param=param), ResponseFailed(response=self.response)]
        return self._numbered(out)

    def _text(self, text: str, logprobs: tuple[TokenLogprob, ...] | None, out: list[ResponseEvent]) -> None:
        entries = logprob_entries(logprobs or ())
        if not isinstance(self._open, OutputMessage):
            if not text:
                self._early += entries if self._open is None else ()
                return
            entries = self._early + entries
            self._enter(OutputMessage(id=self._new_id(OutputMessage)), out)
        if not text and not entries:
            return
        self._texts.append(text)
        self._logprobs += entries
        out.append(OutputTextDelta(item_id=self._open_id, output_index=len(self._items), delta=text, logprobs=entries))

    def _reasoning(self, text: str, out: list[ResponseEvent]) -> None:
        if not isinstance(self._open, ReasoningItem):
            self._enter(ReasoningItem(id=self._new_id(ReasoningItem)), out)
        self._texts.append(text)
        out.append(ReasoningTextDelta(item_id=self._open_id, output_index=len(self._items), delta=text))

    def _call(self, call_id: str, name: str, out: list[ResponseEvent]) -> None:
        namespace, own = self._namespaced.get(name, (UNSET, name))
        call = FunctionCall(id=self._new_id(FunctionCall), call_id=call_id, name=own, namespace=namespace)
        self._enter(call, out)

    def _arguments(self, text: str, out: list[ResponseEvent]) -> None:
        if text:
            self._texts.append(text)
            out.append(FunctionCallArgumentsDelta(item_id=self._open_id, output_index=len(self._items), delta=text))

    def _enter(self, item: OutputItem, out: list[ResponseEvent]) -> None:
        """Begin an item, after the one before it."""
        self._close(out, "completed")
        self._open, self._early = item, []
        index = len(self._items)
        out.append(OutputItemAdded(output_index=index, item=item))
        if isinstance(item, OutputMessage | ReasoningItem):
            part = OutputText() if isinstance(item, OutputMessage) else ReasoningText()
            out.append(ContentPartAdded(item_id=item.id, output_index=index, part=part))

    def _close(self, out: list[ResponseEvent], status: ItemStatus) -> None:
        if self._open is None:
            return
        item, text, index = self._open, "".join(self._texts), len(self._items)
        name, logprobs = item.id, self._logprobs
        match item:
            case OutputMessage():
                part = OutputText(text=text, logprobs=logprobs)
                out.append(OutputTextDone(item_id=name, output_index=index, text=text, logprobs=logprobs))
                out.append(ContentPartDone(item_id=name, output_index=index, part=part))
                done: OutputItem = msgspec.structs.replace(item, content=[part], status=status)
            case ReasoningItem():
                thought = ReasoningText(text=text)
                out.append(ReasoningTextDone(item_id=name, output_index=index, text=text))
                out.append(ContentPartDone(item_id=name, output_index=index, part=thought))
                sent = sealed(text) if self._sealing else None
                done = msgspec.structs.replace(item, content=[thought], encrypted_content=sent, status=status)
            case FunctionCall():
                out.append(FunctionCallArgumentsDone(item_id=name, output_index=index, name=item.name, arguments=text))
                done = msgspec.structs.replace(item, arguments=text, status=status)
            case CompactionItem():
                raise AssertionError("a compaction is never open")
        out.append(OutputItemDone(output_index=index, item=done))
        self._items.append(done)
        self._open, self._texts, self._logprobs = None, [], []

    def _new_id(self, kind: type[OutputItem]) -> str:
        return item_id(kind, self.response.id, len(self._items) + (self._open is not None))

    @property
    def _open_id(self) -> str:
        assert self._open is not None, "pieces of a call come after its start"
        return self._open.id

    def _numbered(self, events: list[ResponseEvent]) -> list[ResponseEvent]:
        for event in events:
            event.sequence_number = self._number
            self._number += 1
        return events


def _failure_code(status: int, code: str | None) -> str:
    """A code of the API's own, by which Codex decides whether to compact, to wait, or to try again."""
    if code in ("context_length_exceeded", OVERLOADED):
        return code
    return "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens, truncated=usage.truncated or UNSET),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens, **predictions([usage])),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def logprob_entries(entries: Iterable[TokenLogprob]) -> list[LogprobEntry]:
    return [
        LogprobEntry(
            entry.token,
            entry.logprob,
            list(entry.raw),
            [TopLogprobEntry(top.token, top.logprob, list(top.raw)) for top in entry.top],
        )
        for entry in entries
    ]


_encode = msgspec.json.Encoder().encode


def encoded(events: Iterable[ResponseEvent]) -> bytes:
    """As server-sent events, each with its type as name."""
    return b"".join([b"event: " + _name(event) + b"\ndata: " + _encode(event) + b"\n\n" for event in events])


def _name(event: ResponseEvent) -> bytes:
    return str(event.__struct_config__.tag).encode()
