"""The engine's options of a request for vectors, scores or labels."""

import pytest

from troupellm.protocol.api.pooling import EmbeddingRequest
from troupellm.server.base.body_room import BodyRoom
from troupellm.server.base.exchange import PROMPT_TOKEN_BYTES
from troupellm.server.pooling.inputs import options

pytestmark = pytest.mark.anyio

MEBIBYTE = 2**20


async def test_a_large_body_gives_its_room_back_with_each_prompt_that_the_engine_takes(make_wire, make_exchange):
    room, exchange = BodyRoom(16 * MEBIBYTE, largest=MEBIBYTE), make_exchange(make_wire())
    with room.reserving("", MEBIBYTE) as exchange.room:
        await exchange.room.enter(0)
        exchange.body_bytes = MEBIBYTE
        taken = options(exchange, EmbeddingRequest(input=["a", "b"]), "embd-1")["taken"]
        for number in (1, 2):
            taken(1_000)
            assert room.num_bytes == MEBIBYTE - number * 1_000 * PROMPT_TOKEN_BYTES


async def test_a_small_body_costs_no_look_at_its_prompts(make_wire, make_exchange):
    room, exchange = BodyRoom(16 * MEBIBYTE, largest=MEBIBYTE), make_exchange(make_wire())
    assert options(exchange, EmbeddingRequest(input="a"), "embd-1")["taken"] is None
    with room.reserving("", 100) as exchange.room:
        exchange.body_bytes = 100
        assert options(exchange, EmbeddingRequest(input="a"), "embd-1")["taken"] is None
