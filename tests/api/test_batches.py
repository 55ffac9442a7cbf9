"""Files and batches through openai-python over real sockets."""

import json
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from troupellm.server.app.app import asgi
from troupellm.tests.support.clients.batching import (
    jsonl,
    line,
    lines_of,
    over,
    sdk,
    serving_batches,
    started,
    uploaded,
)
from troupellm.tests.support.servers.serving import eventually, lifespan_of, running_server, server_config

pytestmark = pytest.mark.anyio


@pytest.fixture
def serving(tiny_engine: Any, tmp_path: Path) -> Callable[..., Any]:
    return partial(serving_batches, tiny_engine, tmp_path / "files")


async def test_a_batch_is_answered_in_the_order_of_its_lines(serving: Any) -> None:
    async with serving() as served, sdk(served) as client:
        bad = [b"{no json", line(3), {"custom_id": "x", "url": "/v1/completions", "body": {}, "method": "GET"}]
        good = [line(number) for number in range(40)]
        wrong = [
            line(90, url="/v1/embeddings"),
            line(91, temperature=-1),
            line(92, model="other"),
            line(93, stream=True),
        ]
        given = [*good[:20], *bad, *good[20:], b"", *wrong]
        file = await client.files.create(file=("in put.jsonl", jsonl(given)), purpose="batch")
        assert (file.filename, file.purpose, file.bytes) == ("in put.jsonl", "batch", len(jsonl(given)))
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
        )
        assert (batch.status, batch.metadata) == ("validating", {"who": "me"})
        done = await over(client, batch.id)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (47, 40, 7)
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        output = await lines_of(client, done.output_file_id)
        assert [entry["custom_id"] for entry in output] == [f"c{number}" for number in range(40)]
        for number, entry in enumerate(output):
            body = entry["response"]["body"]
            assert (entry["error"], entry["response"]["status_code"]) == (None, 200)
            assert body["usage"]["completion_tokens"] == 1 + number % 7
        body = line(5)["body"]
        alone = await client.completions.create(
            **{name: body[name] for name in body if name != "ignore_eos"}, extra_body={"ignore_eos": True}
        )
        assert alone.choices[0].text == output[5]["response"]["body"]["choices"][0]["text"]
        errors = await lines_of(client, done.error_file_id)
        assert [entry["custom_id"] for entry in errors] == [None, "c3", "x", "c90", "c91", "c92", "c93"]


async def test_files_are_listed_read_and_deleted(serving: Any) -> None:
    async with serving() as served, sdk(served) as client:
        files = [await uploaded(client, [line(number)]) for number in range(5)]
        names = [file.id for file in files]
        listed = await client.files.list()
        assert [file.id for file in listed.data] == names[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == names
        assert [file.id async for file in client.files.list(limit=2, after=names[3])] == names[2::-1]
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        assert await client.files.retrieve(names[0]) == files[0]
        content = await client.files.content(names[0])
        assert content.read() == jsonl([line(0)])
        kept = await uploaded(client, [line(0)], expires_after={"anchor": "created_at", "seconds": 3600})
        assert kept.expires_at == kept.created_at + 3600
        assert (await client.files.delete(names[0])).deleted
        for call in (client.files.retrieve, client.files.delete, client.files.content, client.batches.retrieve):
            with pytest.raises(openai.NotFoundError):
                await call(names[0])
        assert not (Path(served.host.config.files_dir) / "content" / names[0]).exists()
        with pytest.raises(openai.BadRequestError):
            await client.files.list(after="file-0")
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=("a", b"x"), purpose="fine-tune")


async def test_a_batch_with_a_wrong_field_is_refused(serving: Any) -> None:
    async with serving(max_batch_lines=3) as served, sdk(served) as client:
        file = await uploaded(client, [line(0)])
        for wrong in (
            {"endpoint": "/v1/files"},
            {"endpoint": "/server_info"},
            {"input_file_id": "file-0"},
            {"completion_window": "8d"},
            {"completion_window": "soon"},
            {"completion_window": "24h\n"},
            {"metadata": {str(number): "x" for number in range(17)}},
        ):
            given = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file.id} | wrong
            with pytest.raises(openai.BadRequestError) as refused:
                await client.batches.create(**given)
            assert refused.value.param in wrong or next(iter(wrong)) in str(refused.value), wrong
        for lines, code in (
            ([], "empty_file"),
            ([b" "], "empty_file"),
            ([line(n) for n in range(4)], "too_many_requests"),
        ):
            batch = await over(client, (await started(client, lines)).id)
            assert (batch.status, batch.errors.data[0].code) == ("failed", code)
            assert batch.failed_at


async def test_one_key_knows_nothing_of_anothers_files_and_batches(serving: Any) -> None:
    keys = ("sk-one", "sk-two")
    async with serving(api_key=keys) as served, sdk(served, keys[0]) as one, sdk(served, keys[1]) as two:
        batch = await over(one, (await started(one, [line(0)])).id)
        file_id = batch.input_file_id
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            for name in (file_id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    await call(name)
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        with pytest.raises(openai.BadRequestError):
            await two.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
        assert (await two.files.list()).data == (await two.batches.list()).data == []
        assert [entry.id for entry in (await one.batches.list()).data] == [batch.id]
        assert len((await one.files.list()).data) == 2


async def test_a_batch_is_cancelled(serving: Any) -> None:
    """Finished answers are kept; lines under way are not waited for."""
    async with serving({"max_num_seqs": 4}) as served, sdk(served) as client:
        lines = [line(0, max_tokens=1), *(line(number, max_tokens=3900) for number in range(1, 40))]
        batch = await started(client, lines)
        with pytest.raises(openai.ConflictError):
            await client.files.delete(batch.input_file_id)
        with anyio.fail_after(30):
            while not (await client.batches.retrieve(batch.id)).request_counts.completed:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        done = await over(client, batch.id)
        assert (done.status, done.request_counts.total) == ("cancelled", 40)
        output = await lines_of(client, done.output_file_id)
        assert len(output) == done.request_counts.completed < 40
        assert output[0]["custom_id"] == "c0"
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        assert (await client.files.delete(batch.input_file_id)).deleted


async def test_a_batch_that_takes_too_long_expires(serving: Any) -> None:
    async with serving() as served, sdk(served) as client:
        engine = served.host.engine
        assert engine is not None
        await engine.pause("keep")
        batch = await started(client, [line(0), b"{", line(2)], window="1s", output_expires_after=LIFE)
        done = await over(client, batch.id)
        assert (done.status, done.request_counts.failed) == ("expired", 3)
        errors = await lines_of(client, done.error_file_id)
        codes = ["batch_expired", "invalid_json_line", "batch_expired"]
        assert [entry["error"]["code"] for entry in errors] == codes
        file = await client.files.retrieve(done.error_file_id)
        assert file.expires_at == file.created_at + LIFE["seconds"]
        await engine.resume()


LIFE = {"anchor": "created_at", "seconds": 7200}


async def test_lines_leave_room_for_whoever_waits_for_an_answer(serving: Any) -> None:
    """Of four rows a batch has two, and none new while the engine sleeps or another request waits."""
    async with serving({"max_num_seqs": 4, "max_num_queued_reqs": 0}) as served, sdk(served) as client:
        batch = await started(client, [line(number, max_tokens=100) for number in range(12)])
        engine = served.host.engine
        most = 0
        for _ in range(6):
            await eventually(lambda: engine.snapshot().scheduler.running > 0)
            answers = [client.completions.create(model="tiny", prompt="now", max_tokens=3) for _ in range(2)]
            most = max(most, engine.snapshot().scheduler.running)
            for answer in answers:
                assert (await answer).usage.completion_tokens  # never refused for want of a place
        assert most == 2
        done = await over(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 12)
        async with served.client() as plain:
            text = (await plain.get("/metrics")).text
        assert 'troupellm_batch_lines_total{result="completed"} 12.0' in text
        assert 'troupellm_batches{status="completed"} 1.0' in text


ENDPOINTS = ("/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize")


@pytest.mark.parametrize(
    "endpoint", ["/v1/chat/completions", *(pytest.param(path, marks=pytest.mark.slow) for path in ENDPOINTS)]
)
async def test_lines_may_ask_for_every_route(serving: Any, endpoint: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/v1/messages": {"messages": messages, "max_tokens": 3},
        "/v1/embeddings": {"input": ["one", "two"]},
        "/tokenize": {"prompt": "hello"},
    }
    lines = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny"} | bodies[endpoint]}]
    lines += [{"custom_id": "b", "method": "POST", "url": endpoint, "body": {"model": "nobody"}}]
    async with serving() as served, sdk(served) as client:
        done = await over(client, (await started(client, lines, endpoint=endpoint)).id)
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        (good,) = await lines_of(client, done.output_file_id)
        (bad,) = await lines_of(client, done.error_file_id)
        assert good["response"]["body"]
        assert bad["response"]["status_code"] in (400, 404)


async def test_without_a_folder_there_are_no_files(tiny_engine: Any) -> None:
    async with tiny_engine() as engine, running_server(engine) as served, sdk(served) as client:
        for call in (client.files.list, client.batches.list):
            with pytest.raises(openai.NotFoundError) as refused:
                await call()
            assert refused.value.code == "not_configured"
            assert "--files-dir" in str(refused.value)


async def test_a_batch_goes_on_where_it_was(serving: Any) -> None:
    """As after a restart: answers that were there stay as they were."""
    async with serving(batch_concurrency=2) as served, sdk(served) as client:
        batch = await started(client, [line(number, max_tokens=1 if number < 8 else 500) for number in range(12)])
        with anyio.fail_after(30):
            while (await client.batches.retrieve(batch.id)).request_counts.completed < 8:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        kept = await served.host.batches.store.transact(_results)
    async with serving() as served, sdk(served) as client:
        done = await over(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 12)
        output = (await client.files.content(done.output_file_id)).read().splitlines()
        assert [json.loads(entry)["custom_id"] for entry in output] == [f"c{number}" for number in range(12)]
        assert output[: len(kept)] == kept


def _results(database: sqlite3.Connection) -> list[bytes]:
    return [data for (data,) in database.execute("SELECT data FROM results ORDER BY line")]


async def test_an_app_works_on_batches_from_its_startup_on(tiny_engine: Any, tmp_path: Path) -> None:
    """An app mounted without its lifespan says so, instead of accepting batches that would never run."""
    config = server_config(files_dir=str(tmp_path / "files"))
    async with tiny_engine() as engine:
        app = asgi(engine, config=config)
        async with running_server(engine, config, app=app) as served, sdk(served) as client:
            file = await uploaded(client, [line(0)])
            with pytest.raises(openai.BadRequestError) as refused:
                await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            assert "lifespan" in str(refused.value)
        async with lifespan_of(app) as answers:
            assert answers == ["lifespan.startup.complete"]
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as plain:
                given = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
                batch = (await plain.post("/v1/batches", json=given)).json()
                with anyio.fail_after(30):
                    while batch["status"] != "completed":
                        await anyio.sleep(0.02)
                        batch = (await plain.get(f"/v1/batches/{batch['id']}")).json()
            other = asgi(engine, config=config)
            async with lifespan_of(other) as refusals:
                assert refusals == ["lifespan.startup.failed"]


@pytest.mark.slow
async def test_a_batch_waits_for_its_disk(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output cannot be written at first; nothing is asked twice for that, and nothing is lost."""
    monkeypatch.setattr("troupellm.server.batches.runner.RETRY_SECONDS", 0.02)
    async with serving() as served, sdk(served) as client:
        file = await uploaded(client, [line(number) for number in range(4)])
        store = served.host.batches.store
        (store.folder / "incoming").rmdir()
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        await eventually(lambda: store.errors > 1)
        kept = await store.transact(_results)
        assert len(kept) == 4
        assert (await client.batches.retrieve(batch.id)).status == "finalizing"
        (store.folder / "incoming").mkdir()
        done = await over(client, batch.id)
        assert done.status == "completed"
        assert (await client.files.content(done.output_file_id)).read().splitlines() == kept
