"""A crowd on one server: everybody gets the answer of a solo run, and nothing stays behind."""

import random

import anyio
import pytest

from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.serving import events_of

pytestmark = pytest.mark.anyio

CROWD = 64


async def test_64_streams_of_mixed_lengths_equal_their_solo_runs(tiny_engine):
    draw = random.Random(7)
    requests = [
        {
            "prompt": [draw.randrange(256) for _ in range(draw.randrange(1, 200))],
            "max_tokens": draw.randrange(1, 30),
            "temperature": draw.choice([0.0, 1.0]),
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(CROWD)
    ]
    crowd: dict[int, list[int]] = {}
    async with tiny_engine() as engine:
        solo = []
        for fields in requests:
            given = dict(fields)
            solo.append(list((await engine.generate(given.pop("prompt"), **given)).token_ids))
        async with under_attack(engine) as attacked:

            async def ask(number: int) -> None:
                body = {"model": "tiny", "stream": True, "return_token_ids": True} | requests[number]
                response = await attacked.client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                choices = [event["choices"][0] for event in events_of(response.text)]
                crowd[number] = [token for choice in choices for token in choice["token_ids"]]

            async with anyio.create_task_group() as group:
                for number in range(CROWD):
                    group.start_soon(ask, number)
    assert [crowd[number] for number in range(CROWD)] == solo
