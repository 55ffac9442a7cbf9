"""`troupellm serve --api-server-count 2`: answers, metrics and probes, deaths of fronts and of the server, drains."""

import json
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from troupellm.protocol.wire.api_process import Apply, Submit
from troupellm.server.api_processes.processes import INTENSITY
from troupellm.server.app.app import asgi
from troupellm.tests.support.clients.sockets import RawSocket, raw_socket
from troupellm.tests.support.environment.shared_memory import lock_files, shared_segments
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.servers.fronts import Fronts, fronts_process, until
from troupellm.tests.support.servers.processes import ON_A_THREAD, alive, serving_process
from troupellm.tests.support.servers.serving import events_of, eventually, http_request

pytestmark = pytest.mark.anyio

CROWD = 32
ODD = (sys.executable, str(Path(__file__).parents[1] / "support" / "servers" / "odd_server.py"))


def body_of(seen: bytes) -> str:
    """The body of a chunked response."""
    rest, body = seen.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
    return body.decode()


async def rest_of(connection: RawSocket) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should."""
    whole = await connection.read_all(60)
    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), whole[-300:]
    return events_of(body_of(whole))


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in event["choices"][0]["token_ids"]]


async def settled(fronts: Fronts, pid: int) -> None:
    """Until the engine has nothing to do, as this front tells it."""

    async def nothing_is_open() -> bool:
        return not await fronts.metric(pid, "troupellm_requests_open")

    await until(nothing_is_open)


def crowd(draw: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [draw.randrange(256) for _ in range(draw.randrange(1, 200))],
            "max_tokens": draw.randrange(1, 30),
            "temperature": draw.choice([0.0, 1.0]),
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(CROWD)
    ]


async def test_answers_metrics_and_probes_over_two_fronts(checkpoint, tiny_engine):
    requests = crowd(random.Random(7))
    async with tiny_engine() as engine:
        solo = []
        for fields in requests:
            given = dict(fields)
            solo.append(list((await engine.generate(given.pop("prompt"), **given)).token_ids))
    answers: dict[int, list[int]] = {}
    async with fronts_process(checkpoint, *ON_A_THREAD) as fronts:
        first, second = fronts.pids

        async def ask(number: int, client: Any) -> None:
            extra = {"return_token_ids": True}
            stream = await client.completions.create(
                model="tiny",
                stream=True,
                extra_body=extra | {"ignore_eos": True},
                **{name: value for name, value in requests[number].items() if name != "ignore_eos"},
            )
            chunks = [chunk async for chunk in stream]
            answers[number] = [token for chunk in chunks for token in chunk.choices[0].token_ids]

        async with AsyncOpenAI(base_url=f"{fronts.server.url}/v1", api_key="none", max_retries=0) as client:
            async with anyio.create_task_group() as group:
                for number in range(CROWD):
                    group.start_soon(ask, number, client)
            chat = [{"role": "user", "content": "hello"}]
            talk = await client.chat.completions.create(model="tiny", messages=chat, max_tokens=5)  # type: ignore[arg-type]
            assert talk.usage is not None
            assert talk.usage.completion_tokens <= 5
        assert [answers[number] for number in range(CROWD)] == solo

        for pid in (first, second):
            assert (await fronts.get(pid, "/readyz"))[0] == 200
            status, models = await fronts.get(pid, "/v1/models")
            assert (status, json.loads(models)["data"][0]["id"]) == (200, "tiny")
            with await fronts.connect(pid, http_request("/tokenize", {"prompt": "abc"}, connection="close")) as wire:
                tokens = json.loads((await wire.read_all()).partition(b"\r\n\r\n")[2])
            assert tokens["count"] == 3
        created = {json.loads((await fronts.get(pid, "/v1/models"))[1])["data"][0]["created"] for pid in fronts.pids}
        assert len(created) == 1
        answered = 'route="/v1/completions",status="200"'
        await settled(fronts, first)
        for pid in (first, second):  # the same whole truth on each
            assert await fronts.metric(pid, "troupellm_http_requests_total", answered) == CROWD
            assert await fronts.metric(pid, "troupellm_requests_finished_total", 'reason="length"') >= CROWD
            assert await fronts.metric(pid, "troupellm_requests_open") == 0
        child = psutil.Process(first)
        assert not any("libtorch" in mapping.path for mapping in child.memory_maps())  # a front has no use for it

        with await fronts.stream(first, max_tokens=4000):  # a client that leaves
            assert await fronts.metric(second, "troupellm_requests_open") == 1
            assert not shared_segments(first) & shared_segments(second), "there is no lock that both could wait for"
            assert not lock_files(fronts.pids)
        await settled(fronts, second)
        assert await fronts.metric(second, "troupellm_cancelled_total", 'by="client"') == 1
        request = {"model": "tiny", "prompt": [5, 999_999], "max_tokens": 3}
        with await fronts.connect(second, http_request("/v1/completions", request, connection="close")) as refused:
            answer = await refused.read_all()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "prompt"
        assert not fronts.server.logged("Traceback")


async def test_a_killed_front_loses_its_own_connections_and_a_killed_server_everything(checkpoint):
    async with fronts_process(checkpoint) as fronts:
        doomed, other = fronts.pids
        await settled(fronts, other)
        lost = await fronts.stream(doomed, max_tokens=4000)
        kept = await fronts.stream(other, max_tokens=500, return_token_ids=True)
        before = await fronts.metric(other, "troupellm_http_requests_total", 'route="/metrics"')
        os.kill(doomed, signal.SIGKILL)
        assert b"[DONE]" not in await lost.read_all()
        events = await rest_of(kept)
        assert len(tokens_of(events)) == 500
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        await fronts.back(2, without=doomed)
        newcomer = next(pid for pid in fronts.pids if pid != other)
        assert await fronts.metric(newcomer, "troupellm_http_requests_total", 'route="/metrics"') > before
        await settled(fronts, newcomer)
        assert await fronts.metric(newcomer, "troupellm_cancelled_total", 'by="client"') == 1
        with await fronts.stream(newcomer, max_tokens=3, return_token_ids=True) as again:
            events = await rest_of(again)
        assert len(tokens_of(events)) == 3
        assert fronts.server.logged("by signal 9")
        server, pids = fronts.server, set(fronts.pids)
        connection = await fronts.stream(fronts.pids[0], max_tokens=4000)
        os.kill(server.pid, signal.SIGKILL)

        async def all_are_gone() -> bool:
            return not alive(pids)

        await until(all_are_gone, 2)
        ending = await connection.read_all(2)  # cut, or told why in the moment that was left; never a normal end
        assert b"[DONE]" not in ending or b'"code":"engine_failed"' in ending
        assert b'"finish_reason":"' not in ending
        for wire in (lost, kept, connection):
            wire.close()

        async def nobody_listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", server.port)) != 0

        await until(nobody_listens, 2)


@pytest.mark.slow
async def test_a_front_that_keeps_dying_ends_the_server(checkpoint):
    async with fronts_process(checkpoint) as fronts:
        server, (steady, victim) = fronts.server, fronts.pids
        for left in range(INTENSITY.restarts, -1, -1):
            os.kill(victim, signal.SIGKILL)
            if left:
                await fronts.back(2, without=victim)
                victim = next(pid for pid in fronts.pids if pid != steady)
                server.note_children()
        assert await server.exit_code(20) == 1
        assert not alive(server.children)


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_sigterm_drains_across_the_fronts(checkpoint, stopped: bool):
    """Also when all processes of the group get the signal, as some service managers have it."""
    pace, flags = {"ODD_STEP_SECONDS": "0.01"}, ("--shutdown-timeout", "3", *(() if stopped else ON_A_THREAD))
    async with fronts_process(checkpoint, *flags, prefix=ODD, environment=pace) as fronts:
        pids = set(fronts.pids)
        short = [await fronts.stream(pid, max_tokens=20) for pid in pids]
        long = [await fronts.stream(pid, max_tokens=4000) for pid in pids]
        idle = await raw_socket(fronts.server.port)
        for pid in [fronts.server.pid, *(pids if stopped else ())]:
            os.kill(pid, signal.SIGTERM)
        refused = await raw_socket(fronts.server.port)
        with anyio.fail_after(5):
            while b"HTTP/1.1 503" not in refused.seen:
                await refused.send(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                await refused.read()
        late = await raw_socket(fronts.server.port, http_request("/v1/completions", {"model": "tiny", "prompt": "x"}))
        answer = await late.read_all(5)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"draining"' in answer
        ends: dict[RawSocket, dict[str, Any]] = {}

        async def read(connection: RawSocket) -> None:
            ends[connection] = (await rest_of(connection))[-1]

        async with anyio.create_task_group() as group:
            for connection in (*short, *long):
                group.start_soon(read, connection)
        assert [ends[connection]["choices"][0]["finish_reason"] for connection in short] == ["length"] * 2
        assert [ends[connection]["error"]["code"] for connection in long] == ["draining"] * 2
        assert await fronts.server.exit_code(5) == 0
        assert not alive(pids)
        for connection in (*short, *long, idle, refused, late):
            connection.close()


@pytest.mark.slow
async def test_a_second_signal_ends_the_drain(checkpoint):
    async with fronts_process(checkpoint, "--shutdown-timeout", "60") as fronts:
        pids = set(fronts.pids)
        with await fronts.stream(fronts.pids[0], max_tokens=4000, n=4) as connection:
            answer = list[bytes]()

            async def read() -> None:  # all the time: who does not read cannot be told
                answer.append(await connection.read_all(30))

            async with anyio.create_task_group() as reading:
                reading.start_soon(read)
                fronts.server.signal(signal.SIGTERM)
                await eventually(lambda: bool(fronts.server.logged("draining 1 requests")))
                fronts.server.signal(signal.SIGTERM)
                assert await fronts.server.exit_code(2) == 128 + signal.SIGTERM
            assert b"draining" in answer[0]
            assert not alive(pids)


@pytest.mark.slow
async def test_before_the_model_is_there_every_front_says_so(checkpoint, tmp_path):
    gate = tmp_path / "loaded"
    async with serving_process(
        checkpoint,
        "--api-server-count",
        "2",
        prefix=ODD,
        environment={"ODD_LOAD_UNTIL": str(gate)},
    ) as server:
        await server.listening()
        fronts = Fronts(server)

        async def both_run() -> bool:
            return len(fronts.pids) == 2

        await until(both_run)
        for pid in fronts.pids:
            status, text = await fronts.get(pid, "/readyz")
            assert status == 503
            assert "loading" in text
            assert (await fronts.get(pid, "/livez"))[0] == 200
        gate.touch()
        await server.ready()
        for pid in fronts.pids:
            assert (await fronts.get(pid, "/readyz"))[0] == 200


@pytest.mark.slow
async def test_a_model_that_cannot_be_loaded_is_exit_code_3(tmp_path):
    async with serving_process(tmp_path, "--api-server-count", "2") as server:
        assert await server.exit_code(60) == 3
        assert not alive(server.children)
        assert not server.logged("Traceback")


@pytest.mark.slow
async def test_a_reader_that_stays_away_is_paused_across_the_socket(checkpoint):
    async with fronts_process(checkpoint, "--stream-budget-tokens", "32") as fronts:
        first, second = fronts.pids
        asked = {"max_tokens": 500, "return_token_ids": True, "n": 4, "temperature": 1, "seed": 3, "logprobs": 5}
        async with fronts.server.client() as client:
            body = {"model": "tiny", "prompt": "Once", "ignore_eos": True} | asked
            choices = (await client.post("/v1/completions", json=body)).json()["choices"]
        with await fronts.stream(first, receive_buffer=4096, **asked) as slow:

            async def it_is_paused() -> bool:
                return await fronts.metric(second, "troupellm_streams_stalled") >= 1

            await until(it_is_paused)
            with await fronts.stream(first, max_tokens=50, prompt="other", return_token_ids=True) as neighbour:
                assert len(tokens_of(await rest_of(neighbour))) == 50
            # A window so small may let one segment through per probe, which is 10 kB/s.
            slow.plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            events = await rest_of(slow)
        for choice in choices:
            mine = [event for event in events if event["choices"][0]["index"] == choice["index"]]
            assert tokens_of(mine) == choice["token_ids"]
            assert len(choice["token_ids"]) == 500


@pytest.mark.slow
async def test_the_cap_holds_for_both_fronts_together(checkpoint):
    async with fronts_process(checkpoint, "--max-num-seqs", "2", "--max-num-queued-reqs", "1") as fronts:
        first, second = fronts.pids
        held = [await fronts.stream(pid, max_tokens=4000) for pid in (first, second, first)]
        for pid in (first, second):
            request = http_request("/v1/completions", {"model": "tiny", "prompt": "x"}, connection="close")
            with await fronts.connect(pid, request) as refused:
                answer = await refused.read_all()
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after" in answer.lower()
        for connection in held:
            connection.close()


@pytest.mark.slow
async def test_limits_per_key_hold_for_both_fronts_together(checkpoint, tmp_path):
    """The key file is read once: fronts that come later know the keys of those before them."""
    file = tmp_path / "keys.toml"
    file.write_text(
        '[[keys]]\nname = "anna"\nkey = "secret-of-anna"\nrequests_per_minute = 4\n'
        '[[keys]]\nname = "otto"\nkey = "secret-of-otto"\n'
    )
    async with fronts_process(checkpoint, "--api-key-file", str(file)) as fronts:
        file.unlink()
        fronts.key = "secret-of-otto"

        async def ask(pid: int, key: str) -> bytes:
            headers = {"authorization": f"Bearer {key}", "connection": "close"}
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            with await fronts.connect(pid, http_request("/v1/completions", body, **headers)) as connection:
                return (await connection.read_all()).lower()

        first, second = fronts.pids
        left = []
        for pid in (first, second, first, second):
            answer = await ask(pid, "secret-of-anna")
            assert answer.startswith(b"http/1.1 200 ")
            left.append(int(answer.partition(b"x-ratelimit-remaining-requests: ")[2].split()[0]))
        assert left == [3, 2, 1, 0]
        os.kill(first, signal.SIGKILL)
        await fronts.back(2, without=first)
        for pid in fronts.pids:  # nothing is forgotten with a front
            answer = await ask(pid, "secret-of-anna")
            assert answer.startswith(b"http/1.1 429 ")
            assert b"rate_limit_exceeded" in answer
            assert (await ask(pid, "secret-of-otto")).startswith(b"http/1.1 200 ")
            assert (await ask(pid, "secret-of-nobody")).startswith(b"http/1.1 401 ")
        assert await fronts.metric(second, "troupellm_rejected_total", 'reason="rate_limit"') == 2


async def test_the_prompts_of_a_streamed_call_come_in_together(tiny_engine):
    """Before the first has heard anything: else its end could give back the room that was taken for all of them."""
    async with tiny_engine() as engine, front_pair(engine) as pair:
        app = asgi(pair.remote)
        pair.to_front.set_open(False)
        body = {"model": "tiny", "prompt": [[5], [6], [7]], "max_tokens": 1, "stream": True, "ignore_eos": True}
        transport, answers = httpx.ASGITransport(app), []
        async with app.host.running(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def ask() -> None:
                answers.append(await client.post("/v1/completions", json=body))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await eventually(lambda: sum(isinstance(frame, Apply) for frame in pair.from_front.frames) == 3)
                assert not [frame for frame in pair.from_front.frames if isinstance(frame, Submit)]
                pair.to_front.set_open(True)
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].text.count('"finish_reason":"length"') == 3
