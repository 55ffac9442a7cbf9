"""Answers with many vectors: encoded item by item while they are sent, so that a large one does not hold up others."""

from array import array
from base64 import b64encode
from collections.abc import Iterable

import msgspec
from anyio.lowlevel import checkpoint
from msgspec import UNSET

from troupellm.protocol.api.chat import UsageBody
from troupellm.protocol.api.pooling import PoolingEnvelope
from troupellm.protocol.api.usage import PromptTokensDetails
from troupellm.protocol.params.outputs import Pooled
from troupellm.server.base.exchange import JSON, Exchange

CHUNK_BYTES = 65_536
"""About what is encoded and written at a time."""


def encode_vector(vector: bytes, *, base64: bool, big: bool = False) -> list[float] | str:
    """float32 as numbers, or as base64."""
    if not base64:
        return array("f", vector).tolist()
    if big:
        swapped = array("f", vector)
        swapped.byteswap()
        vector = swapped.tobytes()
    return b64encode(vector).decode()


def account(exchange: Exchange, pooled: Iterable[Pooled]) -> UsageBody:
    """The usage of the prompts, for the answer and for the access line."""
    usages = [each.usage for each in pooled]
    exchange.prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    exchange.completion_tokens = 0
    cached = sum(usage.cached_tokens for usage in usages)
    truncated = True if any(usage.truncated for usage in usages) else UNSET
    details = PromptTokensDetails(cached, truncated)
    return UsageBody(exchange.prompt_tokens, 0, exchange.prompt_tokens, details)


async def respond_items(exchange: Exchange, envelope: PoolingEnvelope, items: Iterable[msgspec.Struct]) -> None:
    """Send the envelope with `items` as its `data`."""
    pending = [msgspec.json.encode(envelope)[:-1], b',"data":[']
    size, first, started = len(pending[0]), True, False
    for item in items:
        data = msgspec.json.encode(item)
        pending.append(data if first else b"," + data)
        first = False
        size += len(data)
        if size >= CHUNK_BYTES:
            if not started:
                await exchange.start(200, JSON)
                started = True
            await exchange.write(b"".join(pending))
            pending, size = [], 0
            await checkpoint()
    pending.append(b"]}")
    if started:
        await exchange.write(b"".join(pending), last=True)
    else:
        await exchange.respond(200, b"".join(pending))
