"""Row I6 of the fault table where batches are: a server that is killed, and one that is stopped, goes on from the disk.

Answered lines are never asked again: the answers that were on the disk are in the output byte for byte.
"""

import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from troupellm.tests.support.servers.processes import ServerProcess, ready_process, serving_process

pytestmark = pytest.mark.anyio

LINES = 60
ENDINGS = [
    pytest.param(signal.SIGKILL, (), id="killed"),
    pytest.param(signal.SIGTERM, (), id="stopped"),
    pytest.param(signal.SIGKILL, ("--api-server-count", "2"), id="killed-fronts"),
]


def requests() -> bytes:
    """Some take long, so that there is always something under way."""
    lines = []
    for number in range(LINES):
        body = {"model": "tiny", "prompt": f"line {number}", "temperature": 0, "ignore_eos": True}
        body["max_tokens"] = 250 if number % 5 == 0 else 20
        lines.append(json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}))
    return "\n".join(lines).encode()


async def begun(client: httpx.AsyncClient) -> dict[str, Any]:
    form = {"purpose": "batch"}
    file = (await client.post("/v1/files", data=form, files={"file": ("in.jsonl", requests())})).json()
    given = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = await client.post("/v1/batches", json=given)
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


async def until(client: httpx.AsyncClient, batch: dict[str, Any], least: int, status: str = "") -> dict[str, Any]:
    with anyio.fail_after(120):
        while True:
            now: dict[str, Any] = (await client.get(f"/v1/batches/{batch['id']}")).json()
            if now["request_counts"]["completed"] >= least and status in ("", now["status"]):
                return now
            await anyio.sleep(0.02)


def on_disk(folder: Path) -> list[bytes]:
    database = sqlite3.connect(f"file:{folder / 'state.sqlite3'}?mode=ro", uri=True)
    try:
        return [data for (data,) in database.execute("SELECT data FROM results ORDER BY line")]
    finally:
        database.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "flags"), ENDINGS)
async def test_I6_a_batch_goes_on_after_a_restart(
    checkpoint: Path, tmp_path: Path, number: int, flags: tuple[str, ...]
) -> None:
    folder = tmp_path / "files"
    given = ("--files-dir", str(folder), "--batch-concurrency", "4", *flags)
    async with ready_process(checkpoint, *given) as server:
        async with server.client() as client:
            batch = await begun(client)
            await until(client, batch, 10)
            await second_server_is_refused(checkpoint, folder)
        server.signal(number)
        await server.exit_code(20)
    kept = on_disk(folder)
    assert 10 <= len(kept) < LINES
    (folder / "incoming" / "half").write_bytes(b"an upload that was cut")
    (folder / "content" / "file-lost").write_bytes(b"a file that never became known")
    async with ready_process(checkpoint, *given) as server, server.client() as client:
        done = await until(client, batch, LINES, "completed")
        assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        assert done["error_file_id"] is None
        output = (await client.get(f"/v1/files/{done['output_file_id']}/content")).content.splitlines()
        assert [json.loads(line)["custom_id"] for line in output] == [f"c{number}" for number in range(LINES)]
        assert set(kept) <= set(output)
        assert on_disk(folder) == []
        assert sorted(path.name for path in (folder / "content").iterdir()) == sorted(
            [done["input_file_id"], done["output_file_id"]]
        )
        assert not list((folder / "incoming").iterdir())
        assert await server.metric("troupellm_batch_lines_total") == LINES


async def second_server_is_refused(checkpoint: Path, folder: Path) -> None:
    server: ServerProcess
    async with serving_process(checkpoint, "--files-dir", str(folder)) as server:
        assert await server.exit_code(30) == 2


@pytest.mark.slow
async def test_E1_a_batch_does_not_notice_that_its_worker_died(checkpoint: Path, tmp_path: Path) -> None:
    given = ("--files-dir", str(tmp_path / "files"), "--batch-concurrency", "4")
    async with ready_process(checkpoint, *given, spare=True) as server, server.client() as client:
        batch = await begun(client)
        await until(client, batch, 5)
        os.kill(server.workers()[0], signal.SIGKILL)
        done = await until(client, batch, LINES, "completed")
        assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
