"""Row A10 of the fault table: methods, paths, models and user agents that clients make up leave nothing behind."""

import gc
from collections import deque
from functools import partial

import anyio
import pytest

from troupellm.tests.support.servers import canary

pytestmark = pytest.mark.anyio

under_attack = partial(canary.under_attack, canary_tokens=24)


@pytest.fixture
def anyio_backend():
    return ("asyncio", {"use_uvloop": True})


async def test_A10_made_up_names_do_not_add_metric_series(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:

        async def made_up(number: int) -> None:
            name = f"x{number}"
            body = {"model": name, "prompt": "x", "user": name, name: 1}
            await attacked.client.request(name.upper(), f"/{name}", headers={"user-agent": name})
            await attacked.client.post("/v1/completions", json=body)

        async def series() -> int:
            return len((await attacked.client.get("/metrics")).text.splitlines())

        for number in range(5):
            await made_up(number)
        before = await series()
        for number in range(5, 50):
            await made_up(number)
        assert await series() <= before + 4


@pytest.mark.slow
async def test_A10_ten_thousand_made_up_names(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        before = 0
        for number in range(10_000):
            name = f"x{number}"
            await attacked.client.request(name.upper(), f"/v1/{name}", headers={"user-agent": name})
            if number == 10:
                before = len((await attacked.client.get("/metrics")).text.splitlines())
        assert len((await attacked.client.get("/metrics")).text.splitlines()) <= before + 4


ASKING: tuple[tuple[str, dict], ...] = (
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/tokenize", {"prompt": "x"}),
)


def remembered(mark: str) -> set[str]:
    """Texts with a mark that anything in this process holds."""
    gc.unfreeze()  # what was there before the first test, too: see `tests/conftest.py`
    gc.collect()
    holders = gc.get_objects()
    gc.freeze()
    found: set[str] = set()
    for holder in holders:
        kind = type(holder)
        if kind is dict:
            held = [*list(holder), *list(holder.values())]
        elif kind in (list, tuple, set, frozenset, deque):
            held = list(holder)
        else:
            continue
        found.update(one for one in held if type(one) is str and mark in one)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_A10_ten_thousand_models_that_nobody_has_are_forgotten(tiny_engine):
    """By metrics, caches and logs: what the last of them leave is no more than what the first ones did."""
    mark = "made-up-"
    async with tiny_engine() as engine, under_attack(engine) as attacked:

        async def ask(numbers: range) -> None:
            for number in numbers:
                path, fields = ASKING[number % len(ASKING)]
                answer = await attacked.client.post(path, json={"model": f"{mark}{number}", **fields})
                assert answer.status_code == 404, answer.text

        await ask(range(1_000))
        lines = (await attacked.client.get("/metrics")).text.splitlines()
        names = await anyio.to_thread.run_sync(remembered, mark)
        await ask(range(1_000, 10_000))
        text = (await attacked.client.get("/metrics")).text
        assert mark not in text
        assert len(text.splitlines()) <= len(lines) + 4
        assert len(await anyio.to_thread.run_sync(remembered, mark)) <= len(names) + 50
