"""Row H6 of the fault table: what one key does costs no other key anything, and what was used is counted exactly."""

import anyio
import pytest

from troupellm.server.access.keys import read_keys
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.serving import eventually, server_config

pytestmark = pytest.mark.anyio

ASK = {"model": "tiny", "prompt": [7] * 20, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
FILE = """
[[keys]]
name = "victim"
key = "sk-victim"
requests_per_minute = 60
tokens_per_minute = 6000
max_concurrency = 4
[[keys]]
name = "attacker"
key = "sk-attacker"
requests_per_minute = 600
tokens_per_minute = 600000
max_concurrency = 8
"""


def usage_of(engine) -> dict[str, tuple[int, int]]:
    return {tenant.name: (tenant.prompt_tokens, tenant.completion_tokens) for tenant in engine.snapshot().tenants}


@pytest.fixture
def keyed(tiny_engine, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    config = server_config(api_key=("canaries",), api_key_file=str(path))
    return tiny_engine(tenants=read_keys(config).tenants), config


async def leave_early(client, prompt_tokens: int) -> None:
    body = ASK | {"prompt": [9] * prompt_tokens, "max_tokens": 3000, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                return


async def test_H6_one_key_spends_nothing_of_another(keyed):
    engine, config = keyed
    async with engine:
        await attack(engine, config)
        # Nothing runs any more: what all keys together have used is what the engine has generated.
        used = sum(completion for _, completion in usage_of(engine).values())
        assert used == engine.snapshot().scheduler.tokens_generated


async def attack(engine, config) -> None:
    async with (
        under_attack(engine, config, canary_tokens=30) as attacked,
        attacked.served.client(key="sk-victim") as victim,
        attacked.served.client(key="sk-attacker") as attacker,
    ):
        first = await victim.post("/v1/completions", json=ASK)
        assert first.headers["x-ratelimit-limit-requests"] == "60"
        assert first.headers["x-ratelimit-remaining-requests"] == "59"
        assert first.headers["x-ratelimit-remaining-tokens"] == str(6000 - 25)
        prompts = 0
        for body in ({"max_tokens": -1}, {"prompt": [10**6]}, {"prompt": [5] * 5000}, {"max_tokens": 10**6}):
            assert (await attacker.post("/v1/completions", json=ASK | body)).status_code == 400
        async with anyio.create_task_group() as group:
            for number in range(6):
                prompts += 100 + number
                group.start_soon(leave_early, attacker, 100 + number)
        long = await attacker.post("/v1/completions", json=ASK | {"prompt": [8] * 3000})
        assert long.json()["usage"]["prompt_tokens"] == 3000
        for body, param in (
            ({"n": 9}, "n"),
            ({"n": 9, "use_beam_search": True}, "n"),
            ({"prompt": [[5]] * 9}, "prompt"),
            ({"prompt": [[5]] * 3, "n": 3}, "prompt"),
        ):
            refused = await attacker.post("/v1/completions", json=ASK | body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        await eventually(lambda: engine.snapshot().tenants[1].inside == 0)
        last = await victim.post("/v1/completions", json=ASK)
        assert last.status_code == 200
        assert int(last.headers["x-ratelimit-remaining-requests"]) >= 58
        assert int(last.headers["x-ratelimit-remaining-tokens"]) >= 6000 - 2 * 25
        assert last.headers["x-ratelimit-remaining-concurrency"] == "3"
        assert usage_of(engine)["victim"] == (40, 10)
        prompt_tokens, _ = usage_of(engine)["attacker"]
        assert prompt_tokens == prompts + 3000


async def test_H6_a_key_at_its_limit_is_told_when_to_come_back(keyed):
    engine, config = keyed
    async with engine, under_attack(engine, config, canary_tokens=30) as attacked:
        async with attacked.served.client(key="sk-victim") as victim:
            spent = await victim.post("/v1/completions", json=ASK | {"prompt": [3] * 3000, "max_tokens": 300})
            assert spent.status_code == 200
            refused = await victim.post("/v1/completions", json=ASK | {"prompt": [4] * 3500})
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-ratelimit-limit-tokens"] == "6000"
            assert refused.headers["x-ratelimit-reset-tokens"]
            text = refused.text + str(refused.headers)
            assert "sk-victim" not in text
            async with attacked.served.client(key="sk-attacker") as other:
                assert (await other.post("/v1/completions", json=ASK)).status_code == 200
        metrics = (await attacked.client.get("/metrics")).text
        assert 'troupellm_key_limited_total{engine="0",key="victim"' in metrics
        assert "sk-" not in metrics
