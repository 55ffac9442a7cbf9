"""Conversations that other servers have begun, through the whole server: this turn and the next one are answered."""

import json

import pytest

from troupellm.tests.support.chat.template_kinds import KINDS
from troupellm.tests.support.chat.transcripts import ALL_KINDS, BODIES, FIELD, PATH, answer, random_transcript, user
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

TEMPLATES = ("items", "strict system", "alternating", "free")
LENGTHS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


async def post(client, path, body):
    """With escapes for all but ASCII: halves of surrogate pairs have no other form."""
    content = json.dumps({"model": "troupe-builtin"} | body)
    return await client.post(path, content=content, headers={"content-type": "application/json"})


async def answered(make_engine, name, seeds):
    wrong = []
    async with (
        make_engine(chat_template=KINDS[name], kv_cache_memory_bytes=16 * 2**20) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        for api in ALL_KINDS:
            for seed in seeds:
                this = random_transcript(api, seed)
                for entries in (this, [*this, answer("This."), user("And now?")]):
                    body = BODIES[api] | {FIELD[api]: entries, LENGTHS[api]: 1}
                    response = await post(client, PATH[api], body)
                    if response.status_code != 200:
                        wrong.append((api, seed, response.text))
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_random_transcripts_are_answered(builtin_engine, name):
    await answered(builtin_engine, name, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
async def test_many_random_transcripts_are_answered(builtin_engine, name):
    await answered(builtin_engine, name, range(10, 200))


async def test_an_item_of_every_kind_is_answered_and_named(builtin_engine):
    async with (
        builtin_engine(kv_cache_memory_bytes=16 * 2**20) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        for api, kinds in ALL_KINDS.items():
            entries = [entry for kind in kinds.values() for entry in kind]
            body = BODIES[api] | {FIELD[api]: [*entries, user()], LENGTHS[api]: 1}
            response = await post(client, PATH[api], body)
            assert response.status_code == 200, response.text
            assert "result without_call" in response.headers["x-troupellm-skipped"] or api == "responses"
        unknown = [{"type": f"kind_{number}", "id": f"x_{number}"} for number in range(10_000)]
        body = {"input": unknown, "max_output_tokens": 1, "session_id": "x" * 513}
        response = await post(client, "/v1/responses", body)
        assert response.status_code == 200, response.text
        assert response.headers["x-troupellm-skipped"].endswith("item kind_15, 9985 more")


async def test_thoughts_come_in_a_form_that_clients_send_back(tiny_engine):
    include = {"include": ["reasoning.encrypted_content"]}
    asked = {"model": "tiny", "input": "hi", "max_output_tokens": 5, "temperature": 0}
    async with (
        tiny_engine(reasoning_parser="deepseek_r1") as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        whole = (await post(client, "/v1/responses", asked | include)).json()
        streamed = (await post(client, "/v1/responses", asked | include | {"stream": True})).text
        plain = (await post(client, "/v1/responses", asked)).json()
        item = whole["output"][0]
        counts = []
        for more in ({"encrypted_content": item["encrypted_content"]}, {"content": item["content"]}):
            past = {"type": "reasoning", "summary": [], **more}
            body = {"model": "tiny", "input": [user("hi"), past, answer("so"), user("and?")]}
            counts.append((await post(client, "/v1/responses/input_tokens", body)).json())
    assert item["encrypted_content"].startswith("trp1.")
    assert f'"encrypted_content":"{item["encrypted_content"]}"' in streamed
    assert plain["output"][0]["encrypted_content"] is None
    assert counts[0] == counts[1]
