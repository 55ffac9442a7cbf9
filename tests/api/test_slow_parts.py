"""Work that reads every part of a conversation: on the event loop where it is short, else on a thread."""

import threading
from collections.abc import Iterator

import msgspec
import pytest

from troupellm.protocol.api.anthropic import ContextEdit, InputMessage, MessageContextManagement, MessagesRequest
from troupellm.protocol.api.chat import ChatMessage, ChatRequest
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.base.body import INLINE_BYTES
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState
from troupellm.server.messages.create import create
from troupellm.server.openai.chat_turn import INLINE_PARTS, open_turn, read_parts

pytestmark = pytest.mark.anyio

PART = {"type": "text", "text": "x"}


async def unused(*_: object) -> dict:
    raise AssertionError


@pytest.mark.parametrize(
    ("content", "size", "inline"),
    [
        ([PART], 100, True),
        ("x", INLINE_BYTES + 1, True),
        ([PART], INLINE_BYTES + 1, False),
        ([PART] * (INLINE_PARTS + 1), 100, False),
    ],
)
async def test_long_conversations_are_read_on_a_thread(content: object, size: int, inline: bool) -> None:
    scope = {"method": "POST", "path": "/", "raw_path": b"/", "headers": []}
    exchange = Exchange(scope, unused, unused, request_id="r", write_timeout=0.0)
    exchange.body_bytes = size
    messages = [msgspec.convert({"role": "user", "content": content}, ChatMessage)]
    ran_on = await read_parts(exchange, messages, threading.get_ident)
    assert (ran_on == threading.get_ident()) == inline


class Watched(list):
    """Parts that know the threads which have read them."""

    def __init__(self, parts: list[dict]) -> None:
        super().__init__(parts)
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[dict]:
        self.threads.add(threading.get_ident())
        return super().__iter__()


def large_exchange() -> Exchange:
    async def send(_: object) -> None:
        pass

    scope = {"method": "POST", "path": "/", "raw_path": b"/", "headers": []}
    exchange = Exchange(scope, unused, send, request_id="r", write_timeout=0.0)
    exchange.body_bytes = INLINE_BYTES + 1
    return exchange


async def test_the_parts_of_a_large_chat_are_not_read_on_the_event_loop(tiny_engine) -> None:
    parts = Watched([PART])
    request = ChatRequest(messages=[ChatMessage(role="user", content=parts)], max_completion_tokens=1)
    async with (
        tiny_engine() as engine,
        open_turn(ServerState(ServerConfig(), engine), large_exchange(), request, streaming=False) as turn,
    ):
        await turn.collect()
    assert parts.threads
    assert threading.get_ident() not in parts.threads


async def test_the_parts_of_a_large_message_are_not_read_on_the_event_loop(tiny_engine) -> None:
    parts = Watched([PART])
    edits = [ContextEdit(type="clear_tool_uses_20250919"), ContextEdit(type="clear_thinking_20251015")]
    request = MessagesRequest(
        messages=[InputMessage(role="user", content=parts)],
        max_tokens=1,
        context_management=MessageContextManagement(edits=edits),
    )
    async with tiny_engine() as engine:
        await create(ServerState(ServerConfig(), engine), large_exchange(), request)
    assert parts.threads
    assert threading.get_ident() not in parts.threads
