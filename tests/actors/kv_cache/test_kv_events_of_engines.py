"""KV events of a running engine."""

from typing import Any

import anyio
import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.kv_events import BlocksCleared, BlocksStored
from troupellm.tests.support.engines.inside import system_of

pytestmark = pytest.mark.anyio
PROMPT = list(range(300, 311))


async def test_an_engine_tells_of_its_blocks(engine_of: Any) -> None:
    async with engine_of(kv_events="tokens", block_size=4) as engine:
        await engine.generate(PROMPT, max_tokens=2, temperature=0.0)
        read = await engine.read_kv_events(0)
        stored = [event for event in read.events if isinstance(event, BlocksStored)]
        assert [event.token_ids for event in stored[:2]] == [tuple(PROMPT[:4]), tuple(PROMPT[4:8])]
        assert stored[1].parent == stored[0].key
        assert read.last == read.events[-1].seq
        await engine.reset_prefix_cache()
        (cleared,) = (await engine.read_kv_events(read.last, seconds=10)).events
        assert isinstance(cleared, BlocksCleared)


async def test_followers_hear_until_the_engine_ends(engine_of: Any) -> None:
    heard: dict[str, list[int]] = {"late": [], "all": []}
    async with anyio.create_task_group() as group, engine_of(kv_events="keys", block_size=4) as engine:
        await engine.generate(PROMPT, max_tokens=2, temperature=0.0)
        before = (await engine.read_kv_events(None)).last

        async def follow(name: str, after: int | None) -> None:
            async for event in engine.kv_events(after):
                heard[name].append(event.seq)

        group.start_soon(follow, "late", None)
        group.start_soon(follow, "all", 0)
        await anyio.wait_all_tasks_blocked()
        await engine.generate(PROMPT[::-1], max_tokens=2, temperature=0.0)
        last = (await engine.read_kv_events(None)).last
    assert 0 < before < last
    assert heard == {"late": list(range(before + 1, last + 1)), "all": list(range(1, last + 1))}


async def test_an_engine_without_kv_events_refuses_to_read_them(engine_of: Any) -> None:
    async with engine_of() as engine:
        assert system_of(engine).kv_events is None
        with pytest.raises(InvalidRequest, match="off"):
            engine.kv_events()
        with pytest.raises(InvalidRequest, match="off"):
            await engine.read_kv_events(0)
