"""Whose files, batches and stored responses are, and what owners of batches owe each other."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from troupellm.server.batches.runner import MOST_ACTIVE
from troupellm.tests.support.clients.batching import line, lines_of, over, sdk, serving_batches, started
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def serving(tiny_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("troupellm.server.batches.runner.LOOK_SECONDS", 0.02)
    return partial(serving_batches, tiny_engine, tmp_path / "files")


def key_file(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


async def test_files_stay_with_their_keys_after_another_start(serving: Any) -> None:
    """Keys without names are numbered anew: in another order, or with another one in the place of the first."""
    keys = ("sk-one", "sk-two")
    made: dict[str, Any] = {}
    async with serving(api_key=keys) as served:
        for key in keys:
            async with sdk(served, key) as client:
                made[key] = await over(client, (await started(client, [line(0)])).id)
    for given in (keys[::-1], ("sk-new", keys[1])):
        async with serving(api_key=given) as served:
            for key in given:
                async with sdk(served, key) as client:
                    batches = [] if key == "sk-new" else [made[key]]
                    files = {name for batch in batches for name in (batch.input_file_id, batch.output_file_id)}
                    assert [batch.id for batch in (await client.batches.list()).data] == [each.id for each in batches]
                    assert {file.id for file in (await client.files.list()).data} == files


async def test_a_name_keeps_its_files_when_its_key_is_replaced(serving: Any, tmp_path: Path) -> None:
    seen = []
    for key in ("sk-old", "sk-fresh"):
        file = key_file(tmp_path, f"[[keys]]\nname = 'alice'\nkey = '{key}'")
        async with serving(api_key_file=file, api_key=("sk-other",)) as served:
            async with sdk(served, key) as client:
                if not seen:
                    await over(client, (await started(client, [line(0)])).id)
                seen.append(sorted(file.id for file in (await client.files.list()).data))
            async with sdk(served, "sk-other") as client:
                assert (await client.files.list()).data == []
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2


def response(custom_id: str, **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "input": "hi", "max_output_tokens": 16} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": given}


async def test_responses_stored_by_a_line_belong_to_its_owner(serving: Any) -> None:
    keys = ("sk-one", "sk-two")
    ask = partial(started, endpoint="/v1/responses")
    async with serving(api_key=keys) as served, sdk(served, keys[0]) as one, sdk(served, keys[1]) as two:
        done = await over(one, (await ask(one, [response("a"), response("b", background=True)])).id)
        (kept,) = await lines_of(one, done.output_file_id)
        (refused,) = await lines_of(one, done.error_file_id)
        assert (refused["custom_id"], refused["response"]["body"]["error"]["param"]) == ("b", "background")
        name = kept["response"]["body"]["id"]
        assert (await one.responses.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(name)
        statuses = []
        for client in (one, two):
            done = await over(client, (await ask(client, [response("c", previous_response_id=name)])).id)
            (line_,) = await lines_of(client, done.output_file_id or done.error_file_id)
            statuses.append(line_["response"]["status_code"])
        assert statuses == [200, 400]


LIMITED = """
[[keys]]
name = "alice"
key = "sk-alice"
requests_per_minute = 2
[[keys]]
name = "bob"
key = "sk-bob"
"""


async def test_a_key_at_its_limit_holds_up_no_other_and_waits_in_peace(serving: Any, tmp_path: Path) -> None:
    """More batches than have places, more lines than may be out: they are asked when there is a point in it."""
    limited = key_file(tmp_path, LIMITED)
    async with (
        serving(api_key_file=limited) as served,
        sdk(served, "sk-alice") as alice,
        sdk(served, "sk-bob") as bob,
    ):
        before = len(anyio.get_running_tasks())
        made = [(await started(alice, [line(n) for n in range(60)])).id for _ in range(9)]
        engine = served.host.engine
        assert engine is not None
        await eventually(lambda: engine.snapshot().tenants[0].requests == 2)
        with anyio.fail_after(20):
            while await count_of(served, "in_progress") < MOST_ACTIVE:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        done = await over(bob, (await started(bob, [line(number) for number in range(10)])).id, timeout=20)
        assert done.request_counts.completed == 10
        usage = {tenant.name: tenant for tenant in engine.snapshot().tenants}
        out = engine.config.scheduler.max_num_seqs // 2
        assert 1 <= usage["alice"].limited <= 2 * out
        assert len(anyio.get_running_tasks()) - before <= out + 2 * 8
        statuses = {(await alice.batches.retrieve(name)).status for name in made}
        assert statuses <= {"validating", "in_progress"}


async def test_nothing_is_asked_for_a_key_that_was_taken_away(
    serving: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its batches wait for it, or expire."""
    alice_and_bob, bob_alone = LIMITED, LIMITED[LIMITED.rindex("[[keys]]") :]
    async with serving(api_key_file=key_file(tmp_path, alice_and_bob)) as served, sdk(served, "sk-alice") as alice:
        engine = served.host.engine
        assert engine is not None
        await engine.pause("keep")
        waits = await started(alice, [line(0)])
        late = await started(alice, [line(0)], window="1s")
    async with serving(api_key_file=key_file(tmp_path, bob_alone)) as served, sdk(served, "sk-bob") as bob:
        await over(bob, (await started(bob, [line(0)])).id)
        with anyio.fail_after(20):
            while await status_of(served, late.id) != "expired":  # noqa: ASYNC110
                await anyio.sleep(0.02)
        assert await status_of(served, waits.id) in ("validating", "in_progress")
        assert served.host.engine.snapshot().scheduler.tokens_generated == 1
        assert caplog.text.count("nobody has its API key") >= 1
    async with serving(api_key_file=key_file(tmp_path, alice_and_bob)) as served, sdk(served, "sk-alice") as alice:
        assert (await over(alice, waits.id)).request_counts.completed == 1


async def status_of(served: Any, name: str) -> str:
    rows = await served.host.batches.store.read(
        lambda database: database.execute("SELECT status FROM batches WHERE id = ?", (name,)).fetchall()
    )
    return str(rows[0][0])


async def count_of(served: Any, status: str) -> int:
    rows = await served.host.batches.store.read(
        lambda database: database.execute("SELECT count(*) FROM batches WHERE status = ?", (status,)).fetchall()
    )
    return int(rows[0][0])
