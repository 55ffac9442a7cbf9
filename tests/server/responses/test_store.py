"""Responses that are kept: owners, bounds, age, processes that share a file, and what became of those that ended."""

import sqlite3
import stat
from contextlib import closing

import msgspec
import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.storage import responses as store_module, responses_rows as module
from troupellm.server.storage.responses import ResponseStore, TooMuchError
from troupellm.server.storage.responses_rows import LOST, StoredResponse
from troupellm.server.storage.responses_schema import check_database

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Stores:
    """Stores that are closed with the test."""

    def __init__(self):
        self.opened = []

    def __call__(self, **settings):
        self.opened.append(ResponseStore(ServerConfig(**settings)))
        return self.opened[-1]


@pytest.fixture
async def stores():
    made = Stores()
    yield made
    for store in made.opened:
        await store.close()


def response(name, *, previous=None, status="completed", size=0, background=False, logged=False):
    body = msgspec.json.encode({"id": name, "status": status, "text": "x" * size})
    return StoredResponse(
        id=name, previous=previous, status=status, background=background, logged=logged, body=body, items=b"[]"
    )


@pytest.fixture(params=["memory", "file"])
def place(request, tmp_path):
    return {} if request.param == "memory" else {"responses_store": str(tmp_path / "responses.sqlite")}


async def test_a_response_is_there_for_its_owner_only(stores, place):
    store = stores(**place)
    assert await store.put("alice", response("resp_1"))
    assert await store.get("alice", "resp_1") == response("resp_1")
    assert await store.get("bob", "resp_1") is None
    assert not await store.delete("bob", "resp_1")
    assert not await store.update("bob", "resp_1", "cancelled", b"{}")
    with pytest.raises(KeyError):
        await store.chain("bob", "resp_1", 10, 10**6)
    assert (await store.logged("bob", "resp_1", 0))[0] is None
    assert await store.delete("alice", "resp_1")
    assert await store.get("alice", "resp_1") is None


async def test_a_chain_is_read_oldest_first_and_a_gap_in_it_is_told(stores, place):
    store = stores(**place)
    for number in range(3):
        await store.put("a", response(f"resp_{number}", previous=f"resp_{number - 1}" if number else None))
    assert [one.id for one in await store.chain("a", "resp_2", 3, 10**6)] == ["resp_0", "resp_1", "resp_2"]
    with pytest.raises(OverflowError):
        await store.chain("a", "resp_2", 2, 10**6)
    await store.delete("a", "resp_0")
    with pytest.raises(KeyError, match="resp_0"):
        await store.chain("a", "resp_2", 3, 10**6)


async def test_conversations_beyond_the_limit_are_not_read(stores, place, monkeypatch):
    store = stores(**place)
    for number in range(3):
        await store.put("a", response(f"resp_{number}", previous=f"resp_{number - 1}" if number else None, size=500))
    size = sum([len(one.body) + len(one.items) for one in await store.chain("a", "resp_2", 3, 10**6)])
    names = ["resp_0", "resp_1", "resp_2", "resp_none"]
    assert len(await store.chain("a", "resp_2", 3, size)) == 3
    assert list(await store.several("a", names, size)) == names[:3]
    assert await store.several("b", names, 0) == {}
    monkeypatch.setattr(store_module, "read_row", None)
    with pytest.raises(TooMuchError):
        await store.chain("a", "resp_2", 3, size - 1)
    with pytest.raises(TooMuchError):
        await store.several("a", names, size - 1)


async def test_their_number_is_bounded_and_whoever_has_most_loses_the_oldest(stores, place):
    store = stores(responses_store_entries=4, **place)
    await store.put("polite", response("resp_p"))
    for number in range(10):
        await store.put("greedy", response(f"resp_{number}", size=100))
    counts = await store.counts()
    assert (counts.stored, counts.evicted) == (4, {"entries": 7})
    assert await store.get("polite", "resp_p") is not None
    assert [bool(await store.get("greedy", f"resp_{number}")) for number in (6, 7, 8, 9)] == [False, True, True, True]


async def test_their_bytes_are_bounded(stores, place):
    store = stores(responses_store_bytes=1_000, **place)
    assert not await store.put("a", response("resp_large", size=1_000))
    for number in range(20):
        assert await store.put("a", response(f"resp_{number}", size=100))
        assert (await store.counts()).bytes <= 1_000
    assert (await store.counts()).evicted["bytes"] > 0
    assert await store.get("a", "resp_19") is not None


async def test_a_large_response_does_not_push_out_those_of_others(stores, place):
    store = stores(responses_store_bytes=1_000, **place)
    for number in range(4):
        assert await store.put("polite", response(f"resp_{number}", size=50))
    assert not await store.put("greedy", response("resp_large", size=800))
    assert [bool(await store.get("polite", f"resp_{number}")) for number in range(4)] == [True] * 4


async def test_what_was_used_last_stays(stores, place):
    store = stores(responses_store_entries=2, **place)
    await store.put("a", response("resp_1"))
    await store.put("a", response("resp_2"))
    await store.get("a", "resp_1")
    await store.put("a", response("resp_3"))
    assert await store.get("a", "resp_2") is None
    assert await store.get("a", "resp_1") is not None


async def test_a_stored_response_expires_after_its_time(stores, place, monkeypatch):
    store = stores(responses_ttl=60.0, **place)
    await store.put("a", response("resp_1"))
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 59)
    assert await store.get("a", "resp_1") is not None
    monkeypatch.setattr(module.time, "time", lambda: now + 61)
    assert await store.get("a", "resp_1") is None
    counts = await store.counts()
    assert (counts.stored, counts.evicted) == (0, {"expired": 1})


async def test_running_responses_are_not_evicted(stores, place):
    store = stores(responses_store_entries=1, **place)
    await store.put("a", response("resp_run", status="in_progress", background=True))
    await store.put("a", response("resp_1"))
    await store.put("a", response("resp_2"))
    assert await store.get("a", "resp_run") is not None
    assert await store.update("a", "resp_run", "completed", b"{}")
    assert not await store.update("a", "resp_run", "failed", b"{}"), "it has ended"


async def test_events_are_read_from_any_number_on(stores, place):
    store = stores(**place)
    await store.put("a", response("resp_1", status="in_progress", logged=True))
    for first, events in ((0, b"0\n\n1\n\n"), (2, b"2\n\n"), (3, b"3\n\n4\n\n")):
        await store.log("resp_1", first, events)
    assert [first for first, _ in (await store.logged("a", "resp_1", 0))[1]] == [0, 2, 3]
    assert [first for first, _ in (await store.logged("a", "resp_1", 1))[1]] == [0, 2, 3]
    assert [first for first, _ in (await store.logged("a", "resp_1", 4))[1]] == [3]
    await store.delete("a", "resp_1")
    assert await store.logged("a", "resp_1", 0) == (None, [])


async def test_a_log_that_grows_too_long_is_dropped_and_the_response_is_not(stores, place):
    store = stores(responses_store_bytes=8_000, max_background_responses=4, **place)
    await store.put("a", response("resp_1", status="in_progress", logged=True))
    for first in range(30):
        await store.log("resp_1", first, b"x" * 100)
    found, rows = await store.logged("a", "resp_1", 0)
    assert (found.logged, rows) == (False, [])
    assert (await store.counts()).bytes == len(found.body) + len(found.items)
    assert await store.update("a", "resp_1", "completed", b"{}")


async def test_a_file_is_shared_and_survives(stores, tmp_path):
    path = tmp_path / "responses.sqlite"
    one, two = stores(responses_store=str(path)), stores(responses_store=str(path))
    await one.put("a", response("resp_1", status="in_progress", background=True))
    assert (await two.get("a", "resp_1")).running
    assert await one.renew("resp_1")
    assert not await two.renew("resp_1"), "it runs elsewhere"
    assert await two.update("a", "resp_1", "cancelled", b"{}")
    assert not await one.renew("resp_1"), "another process has cancelled it"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await one.close()
    await two.close()
    assert (await stores(responses_store=str(path)).get("a", "resp_1")).status == "cancelled"


async def test_running_responses_of_a_dead_process_have_failed(stores, tmp_path, monkeypatch):
    path = str(tmp_path / "responses.sqlite")
    one, two = stores(responses_store=path), stores(responses_store=path)
    await one.put("a", response("resp_1", status="in_progress", background=True))
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.LEASE_SECONDS + 1)
    lost = await two.get("a", "resp_1")
    assert lost.status == "failed"
    assert msgspec.json.decode(lost.body)["error"]["message"] == LOST


@pytest.mark.parametrize("later", [module.LEASE_SECONDS + 1, -1e9])
async def test_responses_of_a_dead_process_expire_without_being_read(stores, tmp_path, monkeypatch, later):
    """A lease of the future is one from before a reboot."""
    path = str(tmp_path / "responses.sqlite")
    one, two = stores(responses_store=path), stores(responses_store=path, responses_ttl=60.0)
    await one.put("a", response("resp_1", status="in_progress", background=True, logged=True))
    await one.log("resp_1", 0, b"0\n\n")
    assert (await two.counts()).running == 1
    clock, wall = module.time.monotonic(), module.time.time()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock + later)
    counts = await two.counts()
    assert (counts.running, counts.stored) == (0, 1)
    monkeypatch.setattr(module.time, "time", lambda: wall + 10**7)
    counts = await two.counts()
    assert (counts.stored, counts.bytes, counts.evicted) == (0, 0, {"expired": 1})
    events = sqlite3.connect(path)
    assert events.execute("SELECT count(*) FROM events").fetchone() == (0,)
    events.close()


async def test_a_job_that_lives_does_not_keep_the_lease_of_another(stores, tmp_path, monkeypatch):
    store = stores(responses_store=str(tmp_path / "responses.sqlite"))
    for name in ("resp_1", "resp_2"):
        await store.put("a", response(name, status="in_progress", background=True))
    clock = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock + module.LEASE_SECONDS - 1)
    assert await store.renew("resp_1")
    monkeypatch.setattr(module.time, "monotonic", lambda: clock + module.LEASE_SECONDS + 1)
    assert [(await store.get("a", name)).status for name in ("resp_1", "resp_2")] == ["in_progress", "failed"]


async def test_stores_that_know_only_a_part_of_the_responses_keep_none():
    assert not ResponseStore(ServerConfig(api_server_count=2)).enabled
    assert not ResponseStore(ServerConfig(responses_store_entries=0)).enabled
    assert ResponseStore(ServerConfig(api_server_count=2, responses_store="x")).enabled


async def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    (tmp_path / "text").write_text("this is no database, however long it may be " * 100)
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    for path in (tmp_path / "text", tmp_path / "newer", tmp_path / "none" / "x", tmp_path):
        with pytest.raises(ConfigError, match="responses_store") as caught:
            check_database(str(path))
        assert str(tmp_path) not in caught.value.message


async def test_a_response_knows_the_turns_that_were_left_out_also_in_a_file_from_before_that(stores, tmp_path):
    path = tmp_path / "responses.sqlite"
    check_database(str(path))
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("ALTER TABLE responses DROP COLUMN border")
        database.execute(
            "INSERT INTO responses (id, owner, previous, status, background, logged, body, items, bytes, used, expires,"
            " runner, lease) VALUES ('resp_1', 'alice', NULL, 'completed', 0, 0, x'7b7d', x'5b5d', 4, 0, 1e12, '', 0)"
        )
    store = stores(responses_store=str(path))
    assert (await store.get("alice", "resp_1")).border == 0
    assert await store.put("alice", msgspec.structs.replace(response("resp_2", previous="resp_1"), border=3))
    assert [one.border for one in await store.chain("alice", "resp_2", 9, 10_000)] == [0, 3]
