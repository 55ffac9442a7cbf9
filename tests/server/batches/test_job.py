"""A batch whose lines are told to come later, and a folder that is full or that another process writes to."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.lowlevel import checkpoint

from troupellm.protocol.api.batches import Batch, BatchResult, FileObject, LineResponse
from troupellm.protocol.api.caller import Caller
from troupellm.server.batches.concurrency import Share
from troupellm.server.batches.job import Job
from troupellm.server.batches.progress import Progress, unfinished
from troupellm.server.host.internal_requests import Answered
from troupellm.server.storage.batches import Store
from troupellm.server.storage.batches_rows import STATE
from troupellm.tests.support.servers.serving import server_config

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
LINES = 40


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(server_config(files_dir=str(tmp_path)))
    await store.transact(lambda database: None)  # makes the folder
    written = store.incoming("in")
    lines = [{"custom_id": f"c{n}", "method": "POST", "url": URL, "body": {"n": n}} for n in range(LINES)]
    written.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    file = FileObject(id="file-0", bytes=1, created_at=0, filename="in", purpose="batch")
    await store.add_file("name:alice", file, written)
    batch = Batch(
        id="batch_0",
        endpoint=URL,
        input_file_id="file-0",
        completion_window="24h",
        status="validating",
        created_at=0,
        expires_at=2**40,
    )
    await store.add_batch("name:alice", batch, None)
    yield store
    await store.close()


class OpenGovernor:
    """Lets everybody in."""

    most = 4

    async def enter(self) -> None:
        await checkpoint()

    def leave(self) -> None:
        pass


class BusyInside:
    """Tells every line to come later, some times."""

    urls = frozenset({URL})

    def __init__(self) -> None:
        self.refusals = 200
        self.out: set[bytes] = set()
        """Lines that were asked and have no answer."""
        self.most = 0
        self.callers: set[Caller] = set()

    async def post(self, url: str, raw: bytes, *, caller: Caller) -> Answered:
        self.out.add(raw)
        self.most = max(self.most, len(self.out))
        self.callers.add(caller)
        await checkpoint()
        if self.refusals:
            self.refusals -= 1
            return Answered(429, b"{}", "id", 0.0)
        self.out.remove(raw)
        return Answered(200, b"{}", "id")


async def test_lines_that_come_again_do_not_pile_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupellm.server.batches.concurrency.CAREFUL_SECONDS", 0.0)
    inside: Any = BusyInside()
    share = Share(OpenGovernor.most, OpenGovernor())  # type: ignore[arg-type]
    (entry,) = await unfinished(store)
    with anyio.fail_after(30):
        await Job(entry, store, inside, share, tenant="alice").run()
    batch = await store.batch("name:alice", "batch_0")
    assert batch is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", LINES)
    assert inside.most == share.most == OpenGovernor.most
    assert inside.callers == {Caller("alice", "name:alice")}


async def test_reading_the_store_does_not_wait_for_another_processs_transaction(store: Store, tmp_path: Path) -> None:
    await store.read(lambda database: database.execute("PRAGMA busy_timeout = 0"))
    other = sqlite3.connect(tmp_path / STATE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert await store.file("name:alice", "file-0") is not None
        assert len(await unfinished(store)) == 1
        await store.check_room("name:alice")
        page = await store.batches("name:alice", after=None, limit=5)
        assert [batch.id for batch in page.data] == ["batch_0"]
    finally:
        other.close()


async def test_results_that_come_together_share_what_the_storage_limit_leaves(store: Store, tmp_path: Path) -> None:
    def result(number: int) -> BatchResult:
        body = msgspec.Raw(b'"' + b"x" * 1_000 + b'"')
        return BatchResult(
            id=f"r{number}", custom_id=None, response=LineResponse(status_code=200, request_id="q", body=body)
        )

    size = len(msgspec.json.encode(result(0)))
    (entry,) = await unfinished(store)
    store.config = server_config(files_dir=str(tmp_path), max_stored_bytes=1 + 2 * size)
    progress = Progress(store, entry)
    await progress.set_status("in_progress", total=3)
    await progress.put_all([(number, result(number)) for number in (1, 2, 3)])
    batch = await store.batch("name:alice", "batch_0")
    assert batch is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    assert await progress.answered() == {1, 2, 3}
    await progress.finish("completed")
    batch = await store.batch("name:alice", "batch_0")
    assert batch is not None
    assert batch.error_file_id is not None
    assert b"storage_full" in store.content(batch.error_file_id).read_bytes()
