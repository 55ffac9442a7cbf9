"""The official client against the real server, with its retries off."""

from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def sdk(engine, *, key="secret"):
    async with (
        running_server(engine, server_config(api_key=("secret",))) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
        ) as client,
    ):
        yield client


async def test_chat_whole_and_streamed(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as client:
        common = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        whole = await client.chat.completions.create(**common)
        stream = await client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_completion_whole_and_streamed(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as client:
        common = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0, "logprobs": 1}
        whole = await client.completions.create(**common)
        chunks = [chunk async for chunk in await client.completions.create(**common, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens


async def test_models_are_listed_and_retrieved(tiny_engine):
    async with tiny_engine(served_model_name=("org/tiny", "alias")) as engine, sdk(engine) as client:
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("org/tiny")
    assert listed == ["org/tiny", "alias"]
    assert (one.id, one.model_extra["max_model_len"]) == ("org/tiny", engine_length(one))


def engine_length(card) -> int:
    assert card.model_extra["max_model_len"] > 0
    return card.model_extra["max_model_len"]


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"temperature": 9}, openai.BadRequestError, "decimal_above_max_value"),
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
async def test_errors_become_the_clients_own_classes(tiny_engine, fields, error, code):
    async with tiny_engine() as engine, sdk(engine) as client:
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**({"model": "tiny", "messages": MESSAGES} | fields))
    assert caught.value.code == code


async def test_wrong_key_is_an_authentication_error(tiny_engine):
    async with tiny_engine() as engine, sdk(engine, key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_full_waiting_room_is_a_rate_limit_error(tiny_engine):
    async with tiny_engine(max_num_seqs=1, max_num_queued_reqs=1) as engine, sdk(engine) as client:
        long = {
            "model": "tiny",
            "messages": MESSAGES,
            "max_tokens": 1200,  # the first must still run when the second has been let in, on any machine
            "stream": True,
            "extra_body": {"ignore_eos": True},
        }
        streams = [await client.chat.completions.create(**long) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        for stream in streams:
            await stream.close()
    assert caught.value.code == "slow_down"
    assert int(caught.value.response.headers["retry-after"]) >= 1
