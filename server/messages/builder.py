"""From the pieces of a chat turn to the content blocks of a message, and to the events that tell of them.

Answers that are not streamed go the same way with the events left out, so both say the same.
"""

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET

from troupellm.protocol.api.anthropic import (
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from troupellm.protocol.api.usage import MessageTokensDetails
from troupellm.protocol.params.chat_events import CallArguments, CallStart, Content, Finished, Reasoning, TurnEvent
from troupellm.protocol.params.outputs import Usage
from troupellm.server.openai.streaming import predictions


class MessageBuilder:
    """Follows one message. Every method gives the events that are new."""

    def __init__(self, message: Message, *, max_tokens: int, context: int, show_thinking: bool = True) -> None:
        """
        Args:
            max_tokens: what the client allowed.
            context: tokens that prompt and answer may have together; an answer may be cut there before.
            show_thinking: False leaves out what was thought, and not that it was.
        """
        self.message = message
        """Complete once `finish` was called."""
        self._max_tokens = max_tokens
        self._context = context
        self._show_thinking = show_thinking
        self._blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._texts: list[str] = []
        """Pieces of the open block's text, or of its input's JSON."""
        self._finished = Finished("stop")

    def begin(self, prompt_tokens: int, cached_tokens: int = 0) -> list[MessageEvent]:
        """Cached tokens count as computed ones until their number is known; `finish` reports them apart."""
        fresh = prompt_tokens - cached_tokens
        usage = MessageUsage(input_tokens=fresh, cache_read_input_tokens=cached_tokens, output_tokens=0)
        return [MessageStart(message=msgspec.structs.replace(self.message, usage=usage)), Ping()]

    def feed(self, events: Iterable[TurnEvent]) -> list[MessageEvent]:
        out: list[MessageEvent] = []
        for event in events:
            match event.piece:
                case Content(text=text):
                    if text:
                        self._require(TextBlock(text=""), out)
                        self._more(text, TextDelta(text=text), out)
                case Reasoning(text=text):
                    if text:
                        self._require(ThinkingBlock(thinking="", signature=""), out)
                        self._more(text, ThinkingDelta(thinking=text) if self._show_thinking else None, out)
                case CallStart(id=call_id, name=name):
                    self._enter(ToolUseBlock(id=call_id, name=name, input={}), out)
                case CallArguments(text=text):
                    if text:
                        self._more(text, InputJsonDelta(partial_json=text), out)
                case Finished() as finished:
                    self._finished = finished
        return out

    def finish(self, usage: Usage) -> list[MessageEvent]:
        out: list[MessageEvent] = []
        self._close(out)
        reason, sequence = self._stop(usage)
        self.message = msgspec.structs.replace(
            self.message,
            content=self._blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessageUsage(
                input_tokens=usage.prompt_tokens - usage.cached_tokens,
                cache_read_input_tokens=usage.cached_tokens,
                output_tokens=usage.completion_tokens,
                output_tokens_details=_details(usage),
                truncated=usage.truncated or UNSET,
            ),
        )
        delta = StopDelta(stop_reason=reason, stop_sequence=sequence)
        edits = self.message.context_management
        return [*out, MessageDelta(delta=delta, usage=self.message.usage, context_management=edits), MessageStop()]

    def _stop(self, usage: Usage) -> tuple[StopReason, str | None]:
        finished = self._finished
        if finished.reason == "tool_calls":
            return "tool_use", None
        if finished.reason == "length":
            full = usage.completion_tokens < self._max_tokens
            full = full and usage.prompt_tokens + usage.completion_tokens >= self._context
            return ("model_context_window_exceeded" if full else "max_tokens"), None
        if finished.reason == "stop" and isinstance(finished.stop_reason, str):
            return "stop_sequence", finished.stop_reason
        return "end_turn", None

    def _require(self, block: ContentBlock, out: list[MessageEvent]) -> None:
        """Go on with the open block where it is of this kind, else begin this one."""
        if type(self._open) is not type(block):
            self._enter(block, out)

    def _enter(self, block: ContentBlock, out: list[MessageEvent]) -> None:
        self._close(out)
        self._open = block
        out.append(ContentBlockStart(index=len(self._blocks), content_block=block))

    def _more(self, text: str, delta: Any, out: list[MessageEvent]) -> None:
        self._texts.append(text)
        if delta is not None:
            out.append(ContentBlockDelta(index=len(self._blocks), delta=delta))

    def _close(self, out: list[MessageEvent]) -> None:
        block, text, index = self._open, "".join(self._texts), len(self._blocks)
        match block:
            case None:
                return
            case TextBlock():
                self._blocks.append(TextBlock(text=text))
            case ThinkingBlock():
                signature = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
                out.append(ContentBlockDelta(index=index, delta=SignatureDelta(signature=signature)))
                self._blocks.append(ThinkingBlock(thinking=text if self._show_thinking else "", signature=signature))
            case ToolUseBlock():
                self._blocks.append(msgspec.structs.replace(block, input=call_input(text)))
        out.append(ContentBlockStop(index=index))
        self._open, self._texts = None, []


def _details(usage: Usage) -> MessageTokensDetails | None:
    details = predictions([usage])
    return MessageTokensDetails(usage.reasoning_tokens, **details) if details or usage.reasoning_tokens else None


def call_input(arguments: str) -> dict[str, Any]:
    """A call's arguments; what is no JSON object, which only a model without a grammar writes, is shown as it is."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"raw_arguments": arguments}


_encode = msgspec.json.Encoder().encode


def encoded(events: Iterable[MessageEvent]) -> bytes:
    """As server-sent events, each with its type as name."""
    return b"".join(
        [f"event: {event.__struct_config__.tag}\ndata: ".encode() + _encode(event) + b"\n\n" for event in events]
    )


PING = encoded([Ping()])
