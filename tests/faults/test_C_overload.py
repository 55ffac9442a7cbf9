"""Rows C3 and C4 of the fault table: more than fits is refused at once, and what was let in finishes."""

import anyio
import pytest

from troupellm.server.access.keys import read_keys
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.serving import events_of, server_config

pytestmark = pytest.mark.anyio

KEYS = ("canaries", "flood")
ASK = {"model": "tiny", "prompt": "flood", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SEQUENCES, QUEUED = 4, 12


def flooded_engine(tiny_engine, **settings):
    config = server_config(api_key=KEYS)
    settings = {"max_num_seqs": SEQUENCES, "max_num_queued_reqs": QUEUED} | settings
    return tiny_engine(tenants=read_keys(config).tenants, **settings), config


def check_refusal(response) -> None:
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "slow_down")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert response.headers["x-should-retry"] == "true"


async def flood(attacked, requests: int, **fields) -> tuple[list[str], int]:
    """So many requests at once under the other key; the texts of the answers, and how many were refused."""
    texts: list[str] = []
    refused = 0

    async def ask(client) -> None:
        nonlocal refused
        response = await client.post("/v1/completions", json=ASK | {"stream": True} | fields)
        if response.status_code == 200:
            texts.append("".join(event["choices"][0]["text"] for event in events_of(response.text)))
        else:
            check_refusal(response)
            refused += 1

    async with attacked.served.client(key="flood") as client, anyio.create_task_group() as group:
        for _ in range(requests):
            group.start_soon(ask, client)
    return texts, refused


async def test_C3_five_times_what_fits(tiny_engine):
    engine, config = flooded_engine(tiny_engine)
    async with engine, under_attack(engine, config, canary_tokens=30) as attacked:
        solo, none = await flood(attacked, 1)
        assert (len(solo), none) == (1, 0)
        texts, refused = await flood(attacked, 5 * (SEQUENCES + QUEUED))
        assert len(texts) >= SEQUENCES + QUEUED // 2
        assert refused >= 1
        assert set(texts) == set(solo)
        again, refused = await flood(attacked, 3)
        assert (again, refused) == (solo * 3, 0)


async def test_C3_queued_tokens_are_capped_before_they_are_tokenized(tiny_engine, monkeypatch):
    engine, config = flooded_engine(tiny_engine, max_num_queued_reqs=200, max_num_queued_tokens=4000)
    async with engine, under_attack(engine, config, canary_tokens=30) as attacked:
        encoded = 0
        encode = type(engine.tokenizer).encode

        def counting(tokenizer, text, **options):
            nonlocal encoded
            encoded += text.startswith("z")
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(type(engine.tokenizer), "encode", counting)
        texts, refused = await flood(attacked, 40, prompt="z" * 3000, max_tokens=2)
        assert refused >= 1
        assert len(texts) >= 1
        assert encoded == len(texts)


@pytest.mark.parametrize("stream", [False, True])
async def test_C3_n_and_lists_of_prompts_count_whole(tiny_engine, stream):
    """A call is let in with all that it asks for, or not at all: nothing is computed for one that is refused."""
    engine, config = flooded_engine(tiny_engine)
    async with engine, under_attack(engine, config, canary_tokens=30) as attacked:
        hold = anyio.Event()

        async def occupy(task_status) -> None:
            stream_of_four = engine.stream("hold", n=4, max_tokens=2000, ignore_eos=True, tenant="key-2")
            async with stream_of_four as held:
                await held.opened()
                task_status.started()
                await hold.wait()

        async with anyio.create_task_group() as group:
            await group.start(lambda task_status: occupy(task_status))
            async with attacked.served.client(key="flood") as client:
                call = ASK | {"prompt": ["a", "b", "c", "d", "e"], "stream": stream}
                before = engine.snapshot().tenants[1]
                check_refusal(await client.post("/v1/completions", json=call | {"n": 2}))
                after = engine.snapshot().tenants[1]
                assert (after.requests, after.inside) == (before.requests, before.inside)
                assert (await client.post("/v1/completions", json=call)).status_code == 200
                assert engine.snapshot().tenants[1].requests == before.requests + 1
            hold.set()


async def test_C3_a_request_that_waits_longer_than_its_queue_timeout_gets_503(tiny_engine):
    engine, config = flooded_engine(tiny_engine, max_num_seqs=1)
    async with (
        engine,
        under_attack(engine, config, canary_tokens=30) as attacked,
        attacked.served.client(key="flood") as client,
    ):
        async with engine.stream("hold", max_tokens=3000, ignore_eos=True, tenant="key-2") as held:
            await held.opened()
            late = await client.post("/v1/completions", json=ASK | {"queue_timeout": 0.05})
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "server_is_overloaded"
        assert (late.headers["x-should-retry"], "retry-after" in late.headers) == ("true", True)


async def test_C4_a_pool_that_is_far_too_small(tiny_engine):
    """200 requests on 16 blocks: everybody finishes, with the tokens of a solo run."""
    engine = tiny_engine(num_gpu_blocks_override=16, block_size=16, max_num_seqs=64)
    async with engine, under_attack(engine, canary_tokens=30) as attacked:
        asks = [([1 + kind] * (5 + kind), 6 + 2 * kind) for kind in range(10)]

        async def answer(number: int) -> tuple[int, ...]:
            prompt, max_tokens = asks[number % len(asks)]
            completion = await engine.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            return completion.token_ids

        solo = [await answer(number) for number in range(len(asks))]
        crowd: dict[int, tuple[int, ...]] = {}

        async def run(number: int) -> None:
            crowd[number] = await answer(number)

        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(run, number)
        assert [crowd[number] for number in range(200)] == solo * 20
        assert engine.snapshot().scheduler.preemptions > 0
        assert attacked.answered["short"] > 0
