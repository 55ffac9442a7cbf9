"""Work that outlives its request: bounded, ended with its parent, refused without one."""

import logging

import anyio
import pytest

from troupellm.protocol.errors import EngineOverloaded, InvalidRequest, RateLimited
from troupellm.server.host.background import Background

pytestmark = pytest.mark.anyio


async def test_without_a_parent_it_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="lifespan") as caught:
        Background(1).start(anyio.sleep_forever, "background")
    assert (caught.value.param, caught.value.code) == ("background", "unsupported_parameter")


async def test_background_work_is_bounded_and_ends_with_its_parent():
    background = Background(2)
    ended = []

    async def work():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async with background.open():
        background.start(work, "background")
        background.start(work, "background")
        with pytest.raises(EngineOverloaded, match="background"):
            background.start(work, "background")
        await anyio.wait_all_tasks_blocked()
        assert not ended
    assert ended == [True, True]
    assert background.running == 0


async def test_a_failure_is_logged_and_ends_nothing_else(caplog):
    background = Background(2)
    done = anyio.Event()

    async def fail():
        raise RuntimeError("no")

    async def succeed():
        done.set()

    with caplog.at_level(logging.ERROR, "troupellm.server"):
        async with background.open():
            background.start(fail, "background")
            await anyio.wait_all_tasks_blocked()
            background.start(succeed, "background")
            await done.wait()
    assert "has failed" in caplog.text


async def test_no_key_holds_all_of_it():
    background = Background(8)

    def started(key):
        number = 0
        try:
            while True:
                background.start(anyio.sleep_forever, "background", key)
                number += 1
        except EngineOverloaded:
            return number

    async with background.open():
        assert [started(key) for key in ("a", "b", "a", "c", "d", "e")] == [4, 2, 0, 1, 1, 0]
        assert background.running == 8
    one = Background(1)
    async with one.open():
        one.start(anyio.sleep_forever, "background", "a")


async def test_a_key_has_its_share_again_once_its_work_has_ended():
    background = Background(2)
    done = anyio.Event()

    async with background.open():
        background.start(done.wait, "background", "a")
        with pytest.raises(RateLimited, match="share"):
            background.start(anyio.sleep_forever, "background", "a")
        done.set()
        await anyio.wait_all_tasks_blocked()
        background.start(anyio.sleep_forever, "background", "a")
