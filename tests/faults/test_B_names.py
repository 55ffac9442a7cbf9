"""Row B16 of the fault table over every route, streamed and not: the names that clients give to their requests.

Beside them a stream of the same name is live all the time, which no answer is mixed up with. `test_B_fields` has names
that are a field of the body, and what is smuggled into a header.
"""

import json
import re

import anyio
import httpx
import pytest

from troupellm.server.base.router import Route
from troupellm.tests.support.servers.canary import Attacked, under_many as under_attack
from troupellm.tests.support.servers.every_route import (
    KEYS,
    body_of,
    chosen,
    path_of,
    problem_of,
    streams_of,
    with_keys,
)
from troupellm.tests.support.servers.serving import events_of, eventually

pytestmark = pytest.mark.anyio

ROUTES = [
    pytest.param(("/v1/messages", "/log_level"), id="some"),
    pytest.param((), id="every", marks=pytest.mark.slow),
]
TWIN = "zwilling-7"
KEPT = (TWIN, TWIN[:4], "m" * 128, "a.b:c-D_9")
REPLACED = (b"m" * 129, b"m" * 10_000, b"a b", b"\xc3\xbc", b"<script>", b"")
OURS = re.compile(r"[0-9a-f]{32}")
LIVE = {"model": "tiny", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "temperature": 0, "stream": True}


def harmless(routes: list[Route]) -> list[Route]:
    """Those that read, and those with a body that does no harm: to be paused would be."""
    return [route for route in routes if route.body is not None or route.method == "GET"]


async def ask(attacked: Attacked, route: Route, name: bytes, stream: bool) -> httpx.Response:
    headers = {b"authorization": f"Bearer {KEYS[route.scope]}".encode(), b"x-request-id": name}
    content = None
    if route.body is not None:
        headers[b"content-type"] = b"application/json"
        content = json.dumps(body_of(route, stream=stream)).encode()
    return await attacked.client.request(route.method, path_of(route), content=content, headers=headers)


async def live_answer(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/completions", json=LIVE, headers={"x-request-id": TWIN})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, TWIN)
    return "".join(event["choices"][0]["text"] for event in events_of(answer.text))


@pytest.mark.parametrize("only", ROUTES)
async def test_B16_names_of_requests_on_every_route_beside_a_live_twin(tiny_engine, only):
    async with (
        tiny_engine() as engine,
        under_attack(engine, with_keys()) as attacked,
        attacked.new_client() as twin,
    ):
        host, over = attacked.served.host, anyio.Event()
        solo = await live_answer(twin)

        async def live() -> None:
            while not over.is_set():
                assert await live_answer(twin) == solo

        def is_live() -> bool:
            return any(exchange.request_id == TWIN for exchange in host.in_flight)

        wrong, ours = [], []
        async with anyio.create_task_group() as group:
            group.start_soon(live)
            for route in harmless(chosen(attacked, only)):
                for stream in streams_of(route):
                    for name in (*KEPT, *REPLACED):
                        await eventually(is_live)
                        given = name if isinstance(name, bytes) else name.encode()
                        answer = await ask(attacked, route, given, stream)
                        told, problem = answer.headers["x-request-id"], problem_of(route, answer)
                        if isinstance(name, bytes):
                            ours.append(told)
                            problem = problem or (None if OURS.fullmatch(told) else f"named {told}")
                        elif told != name or TWIN in answer.text:
                            problem = f"named {told}: {answer.text[:200]}"
                        wrong.append((route.path, stream, given[:20], problem))
            over.set()
        assert not [entry for entry in wrong if entry[3]]
        assert len(set(ours)) == len(ours) > 0
