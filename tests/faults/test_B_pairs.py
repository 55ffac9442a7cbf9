"""`make matrix`: no request for any route of the server causes a server error."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.app.app import App
from troupellm.server.base.router import Router
from troupellm.server.host.server_state import ServerState
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.servers.every_route import with_keys
from troupellm.tests.support.servers.random_requests import RandomRequests
from troupellm.tests.support.servers.serving import guarded_app, running_server

pytestmark = pytest.mark.anyio

NUMBER = int(os.environ.get("TROUPE_MATRIX", "3000"))
SEED = int(os.environ.get("TROUPE_MATRIX_SEED", "0"))
WORKERS = 8
SECONDS = 60.0
"""For one answer."""
EXPECTED = re.compile('"code":"(no_summary|request_aborted)"')
"""A model of random numbers may write nothing where a conversation is to be compacted, and some of the requests end all
others."""
HERE = str(Path(__file__).resolve().parents[2])
LEAKS = re.compile(rf"Traceback|File \"|{re.escape(HERE)}|site-packages|object at 0x|msgspec\.|troupellm\.")
"""In an answer to a caller who is not the admin."""


def test_every_route_of_the_server_is_in_the_matrix() -> None:
    table = App(ServerState(ServerConfig()), scopes=("open", "api", "admin")).routes
    matrix, router, found = RandomRequests(table, 0), Router(table), set()
    matrix.names.clear()
    matrix.names.append("nobody")
    for sent in matrix.requests(2_000):
        route, _ = router.match(sent.route.method, sent.target.partition("?")[0].encode())
        found.add((route.method, route.path))
    assert found == {(route.method, route.path) for route in table}


async def test_some_requests_for_every_route_cause_no_server_error(tiny_engine: Any, tmp_path: Path) -> None:
    await send_all(tiny_engine, tmp_path, 250, 1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_many_requests_for_every_route_cause_no_server_error(tiny_engine: Any, tmp_path: Path) -> None:
    """`make matrix` sends 30,000 of them and says how they were answered."""
    await send_all(tiny_engine, tmp_path, NUMBER, SEED)


async def send_all(tiny_engine: Any, folder: Path, number: int, seed: int) -> None:
    answers: Counter[tuple[str, str, int]] = Counter()
    wrong: list[tuple[str, str, str, str]] = []
    write_tiny_adapter(folder / "adapters" / "sql", 0)
    config = with_keys(files_dir=str(folder / "files"), max_batches=number, max_files=number)
    engine = tiny_engine(max_model_len=2048, enable_lora=True, lora_dir=[str(folder / "adapters")])
    async with engine, running_server(engine, config, app=guarded_app(engine, config)) as served:
        served.host.batches.runs = True  # no runner: the test looks at the requests only
        matrix = RandomRequests(served.app.routes, seed)
        requests = matrix.requests(number)

        async def work(client: httpx.AsyncClient) -> None:
            for sent in requests:
                method, path = sent.route.method, sent.route.path
                answer = await client.request(method, sent.target, content=sent.content, headers=sent.headers)
                answers[method, path, answer.status_code] += 1
                leaks = sent.route.scope != "admin" and LEAKS.search(answer.text)
                failed = answer.status_code >= 500 and not EXPECTED.search(answer.text)
                if failed or '"internal_error"' in answer.text or leaks:
                    said = f"{answer.status_code} {answer.text[:300]}"
                    wrong.append((method, sent.target, sent.content.decode()[:1000], said))
                elif answer.status_code == 200 and sent.route.scope == "api":
                    matrix.names.extend(names_in(answer))

        async with served.client(timeout=SECONDS) as client, anyio.create_task_group() as group:
            for _ in range(WORKERS):
                group.start_soon(work, client)
        await served.host.batches.close()
    print(*(f"{' '.join(map(str, key))}: {count}" for key, count in sorted(answers.items())), sep="\n")
    assert answers.total() == number
    assert not wrong, f"{len(wrong)} of {number}\n" + "\n".join(map(str, wrong[:20]))


def names_in(answer: httpx.Response) -> list[str]:
    """The name of the object that an answer is about."""
    if answer.headers["content-type"] != "application/json":
        return []
    body = answer.json()
    return [body["id"]] if isinstance(body, dict) and isinstance(body.get("id"), str) else []
