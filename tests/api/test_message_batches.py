"""Batches of messages through anthropic-python over real sockets."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import anyio
import pytest

from troupellm.tests.support.clients.batching import serving_batches
from troupellm.tests.support.servers.serving import Served

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def serving(tiny_engine: Any, tmp_path: Path) -> Callable[..., Any]:
    return partial(serving_batches, tiny_engine, tmp_path / "files")


def sdk(served: Served, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0)


def asks(name: str, **more: Any) -> dict[str, Any]:
    params = {"model": "tiny", "max_tokens": 3, "messages": HI, "temperature": 0, "ignore_eos": True}
    return {"custom_id": name, "params": params | more}


async def ended(client: anthropic.AsyncAnthropic, name: str) -> Any:
    with anyio.fail_after(60):
        while True:
            batch = await client.messages.batches.retrieve(name)
            if batch.processing_status == "ended":
                return batch
            await anyio.sleep(0.02)


async def test_anthropics_client_has_a_batch_answered(serving: Any) -> None:
    async with serving() as served, sdk(served) as client:
        given = [*(asks(f"r-{number}") for number in range(5)), asks("bad", temperature=-1), asks("live", stream=True)]
        made = await client.messages.batches.create(requests=given)
        assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
        assert made.request_counts.processing == 7
        done = await ended(client, made.id)
        counts = done.request_counts
        assert (counts.processing, counts.succeeded, counts.errored, counts.canceled) == (0, 5, 2, 0)
        assert done.ended_at >= done.created_at
        alone = await client.messages.create(
            model="tiny", max_tokens=3, messages=HI, extra_body={"temperature": 0, "ignore_eos": True}
        )
        results = {entry.custom_id: entry.result async for entry in await client.messages.batches.results(made.id)}
        assert set(results) == {entry["custom_id"] for entry in given}
        assert results["r-4"].message.content == alone.content
        assert (results["bad"].type, results["bad"].error.error.type) == ("errored", "invalid_request_error")
        assert "stream" in results["live"].error.error.message
        assert (await client.messages.batches.delete(made.id)).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(made.id)
        async with served.client() as plain:
            assert (await plain.get("/v1/files")).json()["data"] == []


async def test_batches_are_listed_from_either_end_and_are_a_keys_own(serving: Any) -> None:
    async with serving(api_key=("one", "two")) as served, sdk(served, "one") as client, sdk(served, "two") as other:
        names = [(await client.messages.batches.create(requests=[asks("a")])).id for _ in range(3)]
        newest = names[::-1]
        assert [batch.id async for batch in client.messages.batches.list(limit=2)] == newest
        page = await client.messages.batches.list(after_id=newest[0], limit=1)
        assert ([batch.id for batch in page.data], page.has_more) == ([newest[1]], True)
        page = await client.messages.batches.list(before_id=newest[2], limit=1)
        assert ([batch.id for batch in page.data], page.has_more) == ([newest[1]], True)
        assert [batch.id async for batch in other.messages.batches.list()] == []
        for call in (other.messages.batches.retrieve, other.messages.batches.cancel, other.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                await call(names[0])


async def test_a_cancelled_batch_says_so_of_what_was_not_answered(serving: Any) -> None:
    async with serving(engine_settings={"max_num_seqs": 1}) as served, sdk(served) as client:
        given = [asks(f"r{number}", max_tokens=400) for number in range(30)]
        made = await client.messages.batches.create(requests=given)
        with pytest.raises(anthropic.ConflictError):
            await client.messages.batches.delete(made.id)
        assert (await client.messages.batches.cancel(made.id)).processing_status == "canceling"
        done = await ended(client, made.id)
        assert done.cancel_initiated_at is not None
        counts = done.request_counts
        results = {entry.custom_id: entry.result.type async for entry in await client.messages.batches.results(made.id)}
        assert len(results) == 30
        assert list(results.values()).count("canceled") == counts.canceled > 0
        assert list(results.values()).count("succeeded") == counts.succeeded


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "requests"),
        ([asks("a"), asks("a")], "requests[1].custom_id"),
        ([asks("a b")], "custom_id"),
        ([asks("x" * 65)], "custom_id"),
        ([{"custom_id": "a", "params": [1]}], "requests[0].params"),
        ([asks(f"a{number}") for number in range(4)], "requests must have at most 3 entries, got 4"),
    ],
)
async def test_wrong_batches_are_refused_by_name(serving: Any, requests: list[Any], said: str) -> None:
    async with serving(max_batch_lines=3) as served, served.client() as client:
        answer = await client.post("/v1/messages/batches", json={"requests": requests})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    assert answer.json()["type"] == "error"
