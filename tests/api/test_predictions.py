"""Draft counts in usage, as each API's own client reads them; together they equal the engine's counts."""

import anthropic
import httpx
import openai
import pytest

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import running_server
from troupellm.tests.support.speculation.scripted_drafts import MODULE as DRAFTS

pytestmark = pytest.mark.anyio

DRAFTS = {
    "method": "custom", "custom_class": f"{DRAFTS}:Guessing", "num_speculative_tokens": 3, "adaptive": False,
}  # fmt: skip
ASKED = {"model": "tiny", "temperature": 0}
HI = [{"role": "user", "content": "Hi"}]
FIELDS = ("accepted_prediction_tokens", "rejected_prediction_tokens", "prediction_steps")


async def details(url):
    """Of a chat, a response and a message, each whole and streamed: what stands in for the tokens' details."""
    plain = {"max_retries": 0, "api_key": "any"}
    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS), **plain
        ) as client,
        anthropic.AsyncAnthropic(
            base_url=url, http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=NO_TLS), **plain
        ) as other,
    ):
        chat = await client.chat.completions.create(messages=HI, max_tokens=24, **ASKED)
        yield chat.usage.completion_tokens_details
        streamed = await client.chat.completions.create(
            messages=HI, max_tokens=24, stream=True, stream_options={"include_usage": True}, **ASKED
        )
        yield [chunk.usage.completion_tokens_details async for chunk in streamed if chunk.usage][-1]
        response = await client.responses.create(input="Hi", max_output_tokens=24, **ASKED)
        yield response.usage.output_tokens_details
        again = await client.responses.retrieve(response.id)
        assert again.usage == response.usage
        streamed = await client.responses.create(input="Hi", max_output_tokens=24, stream=True, **ASKED)
        yield [event async for event in streamed][-1].response.usage.output_tokens_details
        asked = {"model": "tiny", "max_tokens": 24, "messages": HI, "extra_body": {"temperature": 0}}
        yield (await other.messages.create(**asked)).usage.output_tokens_details
        async with other.messages.stream(**asked) as stream:
            yield (await stream.get_final_message()).usage.output_tokens_details


async def test_every_api_tells_of_drafts(tiny_engine):
    async with tiny_engine(speculative_config=DRAFTS) as engine, running_server(engine) as served:
        told = [each.to_dict() async for each in details(served.url)]
        counted = engine.snapshot().scheduler
    accepted, rejected, steps = (sum(each[name] for each in told) for name in FIELDS)
    assert len(told) == 6
    assert all(each["prediction_steps"] > 0 for each in told)
    assert (accepted, accepted + rejected) == (counted.accepted_draft_tokens, counted.draft_tokens)
    assert steps == counted.drafts
    assert [each.get("reasoning_tokens", each.get("thinking_tokens")) for each in told] == [0] * 6


async def test_nothing_is_told_where_nothing_drafts(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        told = [each and each.to_dict() async for each in details(served.url)]
    assert told == [{"reasoning_tokens": 0}] * 4 + [None] * 2
