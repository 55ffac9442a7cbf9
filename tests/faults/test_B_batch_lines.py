"""Rows A1 to A3 and B12 of the fault table where requests are lines of a file: each bad line costs itself alone."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.server.app.app import asgi
from troupellm.server.batches.runner import held_folder, running_batches
from troupellm.tests.support.servers.canary import Attacked, resident_bytes, under_many as under_attack
from troupellm.tests.support.servers.serving import server_config

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 2, "temperature": 0}
LONGEST = 65_536


def entry(name: str, body: Any = BODY, **fields: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body} | fields).encode()


BAD: dict[str, tuple[bytes, str | int]] = {
    # a line, and the code of its error or the status of its answer
    "no JSON": (b"{", "invalid_json_line"),
    "a list": (b"[1]", "invalid_request"),
    "a number": (b"1", "invalid_request"),
    "no UTF-8": (b'{"custom_id": "\xff"}', "invalid_json_line"),
    "NUL": (b"\0", "invalid_json_line"),
    "nothing in it": (b"{}", "invalid_request"),
    "no name": (entry(""), "invalid_request"),
    "a long name": (entry("n" * 513), "invalid_request"),
    "a number as a name": (entry("x", custom_id=7), "invalid_request"),
    "another method": (entry("method", method="GET"), "invalid_request"),
    "another url": (entry("url", url="/v1/chat/completions"), "mismatched_url"),
    "an admin url": (entry("admin", url="/pause"), "mismatched_url"),
    "the same name": (entry("good-0"), "duplicate_custom_id"),
    "too long": (entry("long", BODY | {"prompt": "y" * LONGEST}), "line_too_long"),
    "deep": (entry("deep").replace(b'"x"', b"[" * 20_000 + b"]" * 20_000), "invalid_json_line"),
    "not so deep": (entry("depth").replace(b'"x"', b"[" * 100 + b"]" * 100), 400),
    "a huge number": (entry("huge").replace(b'"max_tokens": 2', b'"max_tokens": ' + b"9" * 5000), 400),
    "Infinity": (entry("inf").replace(b'"max_tokens": 2', b'"max_tokens": 1e999'), 400),
    "NaN": (entry("nan").replace(b'"max_tokens": 2', b'"max_tokens": NaN'), "invalid_json_line"),
    "a key twice": (entry("twice").replace(b'"max_tokens": 2', b'"max_tokens": 2, "max_tokens": 3'), 400),
    "a text as a body": (entry("text", "hello"), 400),
    "no body": (entry("null", None), 400),
    "another model": (entry("model", BODY | {"model": "../../x"}), 404),
    "a stream": (entry("stream", BODY | {"stream": True}), 400),
    "a wrong value": (entry("value", BODY | {"n": 10**9}), 400),
}


async def batch_of(attacked: Attacked, lines: list[bytes]) -> dict[str, Any]:
    """The batch, once it is over."""
    client = attacked.client
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"\n".join(lines))}}
    file = (await client.post("/v1/files", **form)).json()
    given = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    batch: dict[str, Any] = (await client.post("/v1/batches", json=given)).json()
    with anyio.fail_after(60):
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            await anyio.sleep(0.02)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return batch


async def results(attacked: Attacked, file_id: str) -> list[dict[str, Any]]:
    text = (await attacked.client.get(f"/v1/files/{file_id}/content")).text
    return [json.loads(line) for line in text.splitlines()]


async def test_A1_bad_lines_cost_themselves_alone(tiny_engine: Any, tmp_path: Path) -> None:
    config = server_config(files_dir=str(tmp_path), max_body_bytes=LONGEST)
    lines: list[bytes] = []
    for number, (bad, _) in enumerate(BAD.values()):
        lines += [entry(f"good-{number}"), bad]
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        app = asgi(engine, config=config)
        before = resident_bytes()
        with held_folder(config):
            async with running_batches(engine, config, app.routes, attacked.served.host, app.owners):
                batch = await batch_of(attacked, lines)
        assert batch["status"] == "completed"
        good = await results(attacked, batch["output_file_id"])
        assert [result["custom_id"] for result in good] == [f"good-{number}" for number in range(len(BAD))]
        assert len({json.dumps(result["response"]["body"]["choices"]) for result in good}) == 1
        errors = await results(attacked, batch["error_file_id"])
        for (name, (_, wanted)), result in zip(BAD.items(), errors, strict=True):
            found = result["error"]["code"] if result["response"] is None else result["response"]["status_code"]
            assert found == wanted, (name, result)
            assert len(json.dumps(result)) < 2000
        assert resident_bytes() - before < 64 * 2**20
        await attacked.served.host.batches.close()  # the database is open until the server ends


async def test_A4_a_line_that_never_ends(tiny_engine: Any, tmp_path: Path) -> None:
    """It is passed over piece by piece, however long it is."""
    config = server_config(files_dir=str(tmp_path), max_body_bytes=LONGEST)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        app = asgi(engine, config=config)
        with held_folder(config):
            async with running_batches(engine, config, app.routes, attacked.served.host, app.owners):
                batch = await batch_of(attacked, [entry("a"), b"x" * 16 * 2**20, entry("b")])
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert [result["custom_id"] for result in await results(attacked, batch["output_file_id"])] == ["a", "b"]
        await attacked.served.host.batches.close()
