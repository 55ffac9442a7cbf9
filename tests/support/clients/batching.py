"""Batches through openai-python: what their files hold, and a server that works on them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from openai import AsyncOpenAI

from troupellm.server.access.keys import read_keys
from troupellm.server.app.app import App, asgi
from troupellm.server.batches.runner import held_folder, running_batches
from troupellm.tests.support.servers.serving import Served, running_server, server_config


def line(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "prompt": f"line {number}", "max_tokens": 1 + number % 7, "temperature": 0}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": given | {"ignore_eos": True} | body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((entry if isinstance(entry, bytes) else json.dumps(entry).encode()) + b"\n" for entry in lines)


def sdk(served: Served, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


async def over(client: AsyncOpenAI, batch_id: str, timeout: float = 60) -> Any:
    with anyio.fail_after(timeout):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await anyio.sleep(0.02)


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(entry) for entry in text.splitlines()]


async def uploaded(client: AsyncOpenAI, lines: list[Any], **options: Any) -> Any:
    return await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch", **options)


async def started(client: AsyncOpenAI, lines: list[Any], window: str = "24h", **options: Any) -> Any:
    file = await uploaded(client, lines)
    given = {"endpoint": "/v1/completions", "completion_window": window} | options
    return await client.batches.create(input_file_id=file.id, **given)


@asynccontextmanager
async def serving_batches(
    tiny_engine: Any, folder: Path, engine_settings: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serves a tiny model with a folder for files, whose batches are worked on."""
    config = server_config(files_dir=str(folder), **settings)
    async with tiny_engine(tenants=read_keys(config).tenants, **(engine_settings or {})) as engine:
        app: App = asgi(engine, config=config)
        with held_folder(config):
            async with (
                running_server(engine, config, app=app) as served,
                running_batches(engine, config, app.routes, app.host, app.owners),
            ):
                yield served
