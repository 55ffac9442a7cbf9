"""Rows A1, A4 and A8 of the fault table where a body is a file: bad forms, huge ones, slow ones, and a full disk.

No upload leaves data on the disk or disturbs another client.
"""

import resource
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.server.access.keys import read_keys
from troupellm.server.base.upload import BUFFER_BYTES, MAX_HEADER_BYTES, MAX_HEADERS
from troupellm.server.storage.batches_service import MAX_UPLOADS_OF_ONE
from troupellm.tests.support.servers.canary import Attacked, resident_bytes, under_many as under_attack
from troupellm.tests.support.servers.serving import server_config

pytestmark = pytest.mark.anyio

MIB = 2**20
CAP = 8 * MIB
BOUNDARY = "xyz"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = f'form-data; name="{name}"' + ("" if filename is None else f'; filename="{filename}"')
    return f"--{BOUNDARY}\r\nContent-Disposition: {named}\r\n\r\n".encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
GOOD = part("purpose", b"batch") + part("file", b"{}\n", "in.jsonl") + END
BAD = {
    "empty": (FORM, b"", 400),
    "no form": (FORM, b"hello", 400),
    "no boundary": ("multipart/form-data", GOOD, 400),
    "a long boundary": (f"multipart/form-data; boundary={'b' * 71}", GOOD, 400),
    "another boundary": ("multipart/form-data; boundary=abc", GOOD, 400),
    "JSON": ("application/json", b"{}", 415),
    "no file": (FORM, part("purpose", b"batch") + END, 400),
    "no purpose": (FORM, part("file", b"{}", "a") + END, 400),
    "another purpose": (FORM, part("purpose", b"assistants") + part("file", b"{}", "a") + END, 400),
    "two files": (FORM, part("file", b"1", "a") + part("file", b"2", "b") + END, 400),
    "a file of another name": (FORM, part("purpose", b"batch") + part("data", b"{}", "a") + END, 400),
    "two purposes": (FORM, part("purpose", b"batch") * 2 + part("file", b"{}", "a") + END, 400),
    "many fields": (FORM, b"".join(part(f"f{n}", b"x") for n in range(40)) + END, 400),
    "a long field": (FORM, part("purpose", b"b" * 5000) + part("file", b"{}", "a") + END, 400),
    "long part headers": (FORM, f"--{BOUNDARY}\r\nX: {'y' * MAX_HEADER_BYTES}\r\n\r\n".encode() + END, 400),
    "many part headers": (FORM, f"--{BOUNDARY}\r\n".encode() + b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n" + END, 400),
    "cut short": (FORM, GOOD[: -len(END)], 400),
    "a wrong life": (FORM, part("expires_after[anchor]", b"now") + GOOD, 400),
    "half a life": (FORM, part("expires_after[seconds]", b"3600") + GOOD, 400),
    "a short life": (
        FORM,
        part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"5") + GOOD,
        400,
    ),
    "a life without a length": (FORM, part("expires_after[anchor]", b"created_at") + GOOD, 400),
    "a life that is no number": (
        FORM,
        part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"soon") + GOOD,
        400,
    ),
    "a life in one piece": (FORM, part("expires_after", b'{"anchor": "created_at", "seconds": 3600}') + GOOD, 400),
}
NAMED = {
    # which field each of them is refused for
    "no file": "file",
    "no purpose": "purpose",
    "another purpose": "purpose",
    "a wrong life": "expires_after[anchor]",
    "half a life": "expires_after",
    "a short life": "expires_after[seconds]",
    "a life without a length": "expires_after",
    "a life that is no number": "expires_after[seconds]",
    "a life in one piece": "expires_after",
}


@asynccontextmanager
async def attacked_uploads(tiny_engine: Any, folder: Path, **settings: Any) -> AsyncIterator[Attacked]:
    config = server_config(files_dir=str(folder), max_file_bytes=CAP, **settings)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        yield attacked


async def post(attacked: Attacked, kind: str, body: Any) -> Any:
    return await attacked.client.post("/v1/files", content=body, headers={"content-type": kind})


def nothing_is_left(folder: Path) -> bool:
    parts = (folder / "incoming", folder / "content")
    return not any(list(part.iterdir()) for part in parts if part.exists())


async def test_A1_a_wrong_upload_form_is_refused_and_leaves_nothing(tiny_engine: Any, tmp_path: Path) -> None:
    async with attacked_uploads(tiny_engine, tmp_path) as attacked:
        for name, (kind, body, status) in BAD.items():
            response = await post(attacked, kind, body)
            assert response.status_code == status, (name, response.text)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert name not in NAMED or response.json()["error"]["param"] == NAMED[name], response.text
        assert nothing_is_left(tmp_path)
        whole = await post(attacked, FORM, GOOD)
        assert (whole.status_code, whole.json()["bytes"]) == (200, 3)
        for name in ("../../etc/passwd", "C:\\\\a\\\\b", "/", "a\x7fb"):
            body = part("purpose", b"batch") + part("file", b"1", name) + END
            shown = (await post(attacked, FORM, body)).json()["filename"]
            assert "/" not in shown
            assert "\\" not in shown
            assert shown.isprintable()


async def test_A4_files_that_are_too_large(tiny_engine: Any, tmp_path: Path) -> None:
    """By the declared length at once; by what comes, at the crossing: memory does not grow with either."""

    async def pieces(size: int) -> AsyncIterator[bytes]:
        yield part("purpose", b"batch") + part("file", b"", "big")[:-2]
        for _ in range(size // 65_536):
            yield b"x" * 65_536
        yield b"\r\n" + END

    async with attacked_uploads(tiny_engine, tmp_path) as attacked:
        head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM}\r\ncontent-length: {10**12}\r\n\r\n"
        refused = await attacked.served.raw(head.encode())
        assert b" 413 " in await refused.read_until(b"request_too_large")
        await refused.close()
        before = resident_bytes()
        assert b" 413 " in await sent_in_chunks(attacked, pieces(CAP + 65_536))
        whole = await post(attacked, FORM, pieces(CAP - MIB))
        assert (whole.status_code, whole.json()["bytes"]) == (200, CAP - MIB)
        assert resident_bytes() - before < CAP + 4 * BUFFER_BYTES
        await attacked.client.delete(f"/v1/files/{whole.json()['id']}")
        assert nothing_is_left(tmp_path)


async def sent_in_chunks(attacked: Attacked, pieces: AsyncIterator[bytes]) -> bytes:
    """The server's answer, read while the pieces are sent and after."""
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM}\r\ntransfer-encoding: chunked\r\n\r\n"
    connection = await attacked.served.raw(head.encode())
    with suppress(anyio.BrokenResourceError):
        async for piece in pieces:
            await connection.stream.send(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await connection.stream.send(b"0\r\n\r\n")
    seen = await connection.read_until(b"\r\n\r\n")
    await connection.close()
    return seen


async def test_A4_files_and_bytes_of_a_key_are_bounded(tiny_engine: Any, tmp_path: Path) -> None:
    body = part("purpose", b"batch") + part("file", b"x" * MIB, "a") + END
    async with attacked_uploads(tiny_engine, tmp_path, max_files=3, max_stored_bytes=2 * MIB + 10) as attacked:
        files = [(await post(attacked, FORM, body)).json()["id"] for _ in range(2)]
        full = await post(attacked, FORM, body)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "slow_down")
        assert full.headers["retry-after"]
        small = await post(attacked, FORM, GOOD)
        assert small.status_code == 200
        assert (await post(attacked, FORM, GOOD)).status_code == 429
        metrics = (await attacked.client.get("/metrics")).text
        assert "troupellm_files_refused_total 2.0" in metrics
        assert float(metrics.partition("\ntroupellm_files_bytes ")[2].split()[0]) == 2 * MIB + 3
        for name in files:
            assert (await attacked.client.delete(f"/v1/files/{name}")).status_code == 200
        assert (await post(attacked, FORM, body)).status_code == 200


async def test_A8_uploads_that_stop_or_leave(tiny_engine: Any, tmp_path: Path) -> None:
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM}\r\ncontent-length: {MIB}\r\n\r\n"
    ).encode() + part("purpose", b"batch")
    config = server_config(files_dir=str(tmp_path), max_file_bytes=65_536, body_timeout=0.3)
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        slow = await attacked.served.raw(head.replace(str(MIB).encode(), b"9000"))
        answer = await slow.read_until(b"request_timeout", timeout=20)
        assert b" 408 " in answer
        await slow.close()
        gone = await attacked.served.raw(head.replace(str(MIB).encode(), b"9000"))
        await gone.close()
        with anyio.fail_after(10):
            while attacked.served.host.batches.uploads or not nothing_is_left(tmp_path):  # noqa: ASYNC110
                await anyio.sleep(0.01)


async def test_A8_stalled_uploads_of_a_key_are_no_other_keys_matter(tiny_engine: Any, tmp_path: Path) -> None:
    """They have a part of the places, and end: only bytes that come buy time."""
    keys = ("canaries", "sk-stalls", "sk-other")
    config = server_config(files_dir=str(tmp_path), max_file_bytes=100 * MIB, body_timeout=1.0, api_key=keys)
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM}\r\ncontent-length: {50 * MIB}\r\n"
    stalled = head.encode() + b"authorization: Bearer sk-stalls\r\n\r\n" + part("purpose", b"batch")
    async with (
        tiny_engine(tenants=read_keys(config).tenants) as engine,
        under_attack(engine, config) as attacked,
        attacked.served.client(key="sk-other") as other,
    ):
        batches = attacked.served.host.batches
        connections = [await attacked.served.raw(stalled) for _ in range(MAX_UPLOADS_OF_ONE + 4)]
        answers = [await connection.read_until(b"\r\n\r\n") for connection in connections[MAX_UPLOADS_OF_ONE:]]
        assert all(b" 429 " in answer for answer in answers)
        assert batches.uploads == MAX_UPLOADS_OF_ONE
        whole = await other.post("/v1/files", content=GOOD, headers={"content-type": FORM})
        assert whole.status_code == 200
        for connection in connections[:MAX_UPLOADS_OF_ONE]:
            assert b" 408 " in await connection.read_until(b"request_timeout", timeout=20)
        for connection in connections:
            await connection.close()
        assert batches.uploads == 0


@pytest.mark.slow
async def test_C8_a_disk_that_refuses(tiny_engine: Any, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    async with attacked_uploads(tiny_engine, folder) as attacked:
        first = (await post(attacked, FORM, GOOD)).json()
        shutil.rmtree(folder / "incoming")
        for _ in range(2):
            refused = await post(attacked, FORM, GOOD)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
        (folder / "incoming").mkdir()
        assert (await post(attacked, FORM, GOOD)).status_code == 200
        (folder / "content" / first["id"]).unlink()
        assert (await attacked.client.get(f"/v1/files/{first['id']}/content")).status_code == 404
        assert "troupellm_files_errors_total 2.0" in (await attacked.client.get("/metrics")).text


async def test_C8_a_disk_that_is_full(tiny_engine: Any, tmp_path: Path) -> None:
    """No file of this process may be longer than a MiB for a while."""
    body = part("purpose", b"batch") + part("file", b"x" * 3 * MIB, "a") + END
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with attacked_uploads(tiny_engine, tmp_path) as attacked:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
        try:
            refused = await post(attacked, FORM, body)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
        assert nothing_is_left(tmp_path)
        assert (await post(attacked, FORM, body)).status_code == 200


def _parts(data: bytes, size: int) -> Iterator[bytes]:
    for first in range(0, len(data), size):
        yield data[first : first + size]


@pytest.mark.parametrize("size", [7, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 64))])
async def test_A1_a_form_is_the_same_however_it_is_cut(tiny_engine: Any, tmp_path: Path, size: int) -> None:
    content = b"\r\n--xy\r\n--xyz-\r--xyz\n" * 5

    async def pieces() -> AsyncIterator[bytes]:
        for piece in _parts(part("purpose", b"batch") + part("file", content, "a") + END, size):
            yield piece

    async with attacked_uploads(tiny_engine, tmp_path) as attacked:
        file = (await post(attacked, FORM, pieces())).json()
        stored = await attacked.client.get(f"/v1/files/{file['id']}/content")
        assert stored.content == content
