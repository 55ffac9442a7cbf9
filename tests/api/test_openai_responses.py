"""openai-python's responses API against the real server: its normal features, with its retries off."""

from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import httpx
import openai
import pytest

from troupellm.tests.support.clients.plain_http import NO_TLS
from troupellm.tests.support.servers.serving import eventually, running_server, server_config

pytestmark = pytest.mark.anyio

GREEDY = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}


def client_of(served, key="secret"):
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1",
        api_key=key,
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
    )


@asynccontextmanager
async def sdk(engine, **settings):
    async with (
        running_server(engine, server_config(api_key=("secret", "other"), **settings)) as served,
        client_of(served) as client,
        client_of(served, "other") as stranger,
    ):
        yield client, stranger


async def test_whole_and_streamed_say_the_same(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        whole = await client.responses.create(input="Hi", **GREEDY)
        events = [event async for event in await client.responses.create(input="Hi", stream=True, **GREEDY)]
        async with client.responses.stream(input="Hi", **GREEDY) as stream:
            helped = [event async for event in stream]
    last = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert last.output_text == whole.output_text == helped[-1].response.output_text
    assert (last.status, last.incomplete_details) == (whole.status, whole.incomplete_details)
    assert last.usage.output_tokens == whole.usage.output_tokens > 0
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


async def test_a_response_repeats_the_parameters_of_its_request(tiny_engine):
    asked = {"instructions": "Be kind.", "metadata": {"a": "b"}, "user": "me", "parallel_tool_calls": False}
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        response = await client.responses.create(input="Hi", top_p=0.5, max_tool_calls=3, **asked, **GREEDY)
    told = response.model_dump()
    assert {name: told[name] for name in asked} == asked
    assert (told["temperature"], told["top_p"], told["max_output_tokens"], told["max_tool_calls"]) == (0, 0.5, 8, 3)


async def test_a_conversation_goes_on_from_its_last_response(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as (client, stranger):
        first = await client.responses.create(input="One", **GREEDY)
        second = await client.responses.create(input="Two", previous_response_id=first.id, **GREEDY)
        third = await client.responses.create(input="Three", previous_response_id=second.id, **GREEDY)
        history = [{"role": "user", "content": "One"}, *first.output, {"role": "user", "content": "Two"}]
        by_hand = [*history, *second.output, {"role": "user", "content": "Three"}]
        whole = await client.responses.create(input=by_hand, **GREEDY)
        referred = [{"type": "item_reference", "id": item.id} if hasattr(item, "id") else item for item in by_hand]
        again = await client.responses.create(input=referred, **GREEDY)
        with pytest.raises(openai.BadRequestError) as caught:
            await stranger.responses.create(input="x", previous_response_id=first.id, **GREEDY)
        unread = await stranger.responses.with_raw_response.create(input=referred, **GREEDY)
        questions = [item for item in referred if "role" in item]
        alone = await stranger.responses.create(input=questions, **GREEDY)
    assert third.previous_response_id == second.id
    assert third.output_text == whole.output_text == again.output_text
    assert third.usage.input_tokens == whole.usage.input_tokens == again.usage.input_tokens
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert unread.headers["x-troupellm-skipped"] == "item item_reference"
    assert unread.parse().usage.input_tokens == alone.usage.input_tokens


async def test_retrieved_deleted_and_nobody_elses(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as (client, stranger):
        made = await client.responses.create(input="Hi", **GREEDY)
        forgotten = await client.responses.create(input="Hi", store=False, **GREEDY)
        assert await client.responses.retrieve(made.id) == made
        for who, name in ((stranger, made.id), (client, forgotten.id), (client, "resp_none")):
            with pytest.raises(openai.NotFoundError) as caught:
                await who.responses.retrieve(name)
            assert caught.value.code == "response_not_found"
            with pytest.raises(openai.NotFoundError):
                await who.responses.delete(name)
            with pytest.raises(openai.NotFoundError):
                await who.responses.cancel(name)
            with pytest.raises(openai.NotFoundError):
                await who.responses.input_items.list(name)
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
    assert (made.store, forgotten.store) == (True, False)


async def test_input_items_in_pages(tiny_engine):
    given = [{"role": "user", "content": f"item {number}"} for number in range(5)]
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        made = await client.responses.create(input=given, **GREEDY)
        items = client.responses.input_items
        listed = [item.content[0].text async for item in items.list(made.id, order="asc", limit=2)]
        newest = await items.list(made.id, limit=1)
        with pytest.raises(openai.BadRequestError) as caught:
            await items.list(made.id, after="nothing")
        with pytest.raises(openai.BadRequestError):
            await items.list(made.id, limit=0)
    assert listed == [f"item {number}" for number in range(5)]
    assert (newest.data[0].content[0].text, newest.has_more) == ("item 4", True)
    assert caught.value.param == "after"


async def test_a_background_response_ends_as_one_that_was_awaited(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        queued = await client.responses.create(input="Hi", background=True, **GREEDY)
        assert queued.status == "queued"
        done = queued
        with anyio.fail_after(20):
            while done.status in ("queued", "in_progress"):
                done = await client.responses.retrieve(queued.id)
        whole = await client.responses.create(input="Hi", **GREEDY)
        assert await client.responses.cancel(queued.id) == done, "it has ended"
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(whole.id)
    assert (done.output_text, done.status) == (whole.output_text, whole.status)


async def test_a_background_stream_survives_its_reader_and_can_be_taken_up(tiny_engine):
    long = {"input": "Hi", "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        stream = await client.responses.create(**GREEDY | long, background=True, stream=True)
        seen = [await anext(stream) for _ in range(6)]
        await stream.close()
        rest = await client.responses.retrieve(seen[0].response.id, stream=True, starting_after=5)
        later = [event async for event in rest]
        again = [event async for event in await client.responses.retrieve(seen[0].response.id, stream=True)]
        whole = await client.responses.create(**GREEDY | long)
        with pytest.raises(openai.BadRequestError):
            await client.responses.retrieve(whole.id, stream=True)
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert seen + later == again
    assert [event.sequence_number for event in again] == list(range(len(again)))
    assert again[-1].type == "response.incomplete"
    assert again[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in again if event.type == "response.output_text.delta") == whole.output_text


@pytest.mark.parametrize("streaming", [False, True])
async def test_background_responses_are_cancelled(tiny_engine, streaming):
    long = {"input": "Hi", "max_output_tokens": 3000, "extra_body": {"ignore_eos": True}, "background": True}
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        stream = None
        if streaming:
            stream = await client.responses.create(**GREEDY | long, stream=True)
            name = (await anext(stream)).response.id
        else:
            name = (await client.responses.create(**GREEDY | long)).id
        cancelled = await client.responses.cancel(name)
        assert engine.snapshot().open_requests == 0
        found = await client.responses.retrieve(name)
        rest = [event async for event in stream] if stream is not None else []
    assert (cancelled.status, found.status) == ("cancelled", "cancelled")
    if streaming:
        assert [event.type for event in rest[-2:]] == ["error", "response.failed"]
        assert rest[-2].code == "response_cancelled"


async def test_deleting_a_background_response_ends_it(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        made = await client.responses.create(
            input="Hi", **GREEDY | {"max_output_tokens": 3000}, background=True, extra_body={"ignore_eos": True}
        )
        await client.responses.delete(made.id)
        await eventually(lambda: engine.snapshot().open_requests == 0)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_background_responses_are_bounded_and_refused_as_others_are(tiny_engine):
    async with tiny_engine() as engine, sdk(engine, max_background_responses=1) as (client, _):
        long = {"max_output_tokens": 3000, "background": True, "extra_body": {"ignore_eos": True}}
        first = await client.responses.create(input="Hi", **GREEDY | long)
        with pytest.raises(openai.InternalServerError) as full:
            await client.responses.create(input="Hi", **GREEDY | long)
        await client.responses.cancel(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input="x" * 5000, **GREEDY | long)
        with pytest.raises(openai.BadRequestError) as unstored:
            await client.responses.create(input="Hi", background=True, store=False, **GREEDY)
    assert (full.value.status_code, full.value.code) == (503, "server_is_overloaded")
    assert caught.value.code == "context_length_exceeded"
    assert unstored.value.param == "background"


async def test_a_server_without_a_store_says_so(tiny_engine):
    async with tiny_engine() as engine, sdk(engine, responses_store_entries=0) as (client, _):
        made = await client.responses.create(input="Hi", **GREEDY)
        for field in ({"store": True}, {"background": True}, {"previous_response_id": made.id}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(input="Hi", **field, **GREEDY)
            assert (caught.value.param, caught.value.code) == (next(iter(field)), "unsupported_parameter")
        with pytest.raises(openai.BadRequestError):
            await client.responses.retrieve(made.id)
    assert made.store is False


async def test_responses_in_a_file_outlive_the_server(tiny_engine, tmp_path):
    settings = {"responses_store": str(tmp_path / "responses.sqlite")}
    async with tiny_engine() as engine:
        async with sdk(engine, **settings) as (client, _):
            made = await client.responses.create(input="One", **GREEDY)
            running = await client.responses.create(
                input="Hi", **GREEDY | {"max_output_tokens": 3000}, background=True, extra_body={"ignore_eos": True}
            )
        async with sdk(engine, **settings) as (client, stranger):
            assert await client.responses.retrieve(made.id) == made
            ended = await client.responses.retrieve(running.id)
            await client.responses.create(input="Two", previous_response_id=made.id, **GREEDY)
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.retrieve(made.id)
    assert (ended.status, ended.error.code) == ("failed", "server_error")


async def test_responses_have_the_asked_log_probabilities(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        common = {"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"], **GREEDY}
        whole = await client.responses.create(**common)
        events = [event async for event in await client.responses.create(**common, stream=True)]
    entries = whole.output[0].content[0].logprobs
    assert len(entries) == whole.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in deltas] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


async def test_what_is_skipped_is_named_in_the_answer(tiny_engine):
    tools = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    given = [search, {"role": "user", "content": "Hi"}]
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        whole = await client.responses.with_raw_response.create(input=given, tools=tools, **GREEDY)
        later = {"previous_response_id": whole.parse().id}
        plain = await client.responses.with_raw_response.create(input="Hi", **later, **GREEDY)
    assert whole.headers["x-troupellm-skipped"] == "tool web_search, tool custom, item web_search_call"
    assert "x-troupellm-skipped" not in plain.headers


async def test_the_counted_input_tokens_are_those_of_the_usage(tiny_engine):
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        made = await client.responses.create(input="Hi", instructions="Be kind.", **GREEDY)
        count = await client.responses.input_tokens.count(model="tiny", input="Hi", instructions="Be kind.")
    assert count.input_tokens == made.usage.input_tokens


@pytest.mark.parametrize("given", ["", []])
async def test_a_probe_is_answered(tiny_engine, given):
    async with tiny_engine() as engine, sdk(engine) as (client, _):
        response = await client.responses.create(model="tiny", input=given, max_output_tokens=1, store=False)
    assert (response.usage.output_tokens, response.status) == (1, "incomplete")


async def test_truncation_drops_the_oldest_turns_only_when_asked(tiny_engine):
    turns = [{"role": "developer", "content": "Stay."}]
    for number in range(8):
        turns += [{"role": "user", "content": f"q{number} " * 5}, {"role": "assistant", "content": f"a{number}"}]
    turns.append({"role": "user", "content": "last"})
    async with tiny_engine(max_model_len=256) as engine, sdk(engine) as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input=turns, **GREEDY)
        cut = await client.responses.create(input=turns, truncation="auto", **GREEDY)
        kept = [turns[0], *turns[13:]]
        by_hand = await client.responses.create(input=kept, truncation="auto", **GREEDY)
        more = await client.responses.input_tokens.count(model="tiny", input=[turns[0], *turns[11:]])
        alone = [{"role": "user", "content": "x" * 300}]
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(input=alone, truncation="auto", **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert (cut.usage.input_tokens, cut.output_text) == (by_hand.usage.input_tokens, by_hand.output_text)
    assert more.input_tokens > 0.6 * (256 - 8) >= cut.usage.input_tokens


async def test_a_truncated_conversation_begins_at_the_same_place_in_its_next_turns(tiny_engine):
    def said(number):
        return {"role": "user", "content": f"q{number} " * 5}

    turns = [turn for number in range(9) for turn in (said(number), {"role": "assistant", "content": f"a{number}"})]
    asked = {"truncation": "auto", **GREEDY}
    async with tiny_engine(max_model_len=256) as engine, sdk(engine) as (client, _):
        last = await client.responses.create(input=[*turns, said(9)], **asked)
        lengths = [last.usage.input_tokens]
        cached = []
        for number in range(10, 20):
            last = await client.responses.create(input=[said(number)], previous_response_id=last.id, **asked)
            lengths.append(last.usage.input_tokens)
            cached.append(last.usage.input_tokens_details.cached_tokens)
    cuts = [place for place, (before, after) in enumerate(pairwise(lengths)) if after < before]
    assert 1 <= len(cuts) <= 4, "two turns and more fit into the room that a cut leaves"
    assert max(lengths) > 0.8 * (256 - 8) >= min(lengths)
    for place, (before, tokens) in enumerate(zip(lengths, cached, strict=False)):
        if place not in cuts:
            assert tokens >= before - before % 16 - 16, "the prompt of the turn before, but for its last block"
