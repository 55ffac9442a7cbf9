"""Rows I1 to I5 of the fault table: start, drain and stop of the real server process.

Every other attempt has the worker in a process of its own, as servers do by themselves; the others have it on a thread.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import anyio
import pytest

from troupellm.tests.support.clients.sockets import raw_socket
from troupellm.tests.support.servers.processes import START_SECONDS, alive, every_other, ready_process, serving_process
from troupellm.tests.support.servers.serving import events_of, http_request

pytestmark = pytest.mark.anyio

TWENTY = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 21))]
THREE = TWENTY[:3]
ODD = (sys.executable, str(Path(__file__).parents[1] / "support" / "servers" / "odd_server.py"))
QUESTION = {"model": "tiny", "prompt": "Once", "temperature": 0, "ignore_eos": True}
PACE = {"ODD_STEP_SECONDS": "0.01"}
GRACE_SECONDS = 2.0
ABORT_SECONDS = 1.0
NOTICE_SECONDS = 5.0
"""Seconds that a busy machine may take until a test sees the end of a process. The bound is held by the process itself:
its own
timer ends it at the latest, with another exit code where everything should have gone well."""


class Answers:
    """Streams that run beside the test; `texts` has what each got."""

    def __init__(self, server, group: anyio.abc.TaskGroup) -> None:
        self._server = server
        self._group = group
        self.texts: dict[int, str] = {}
        self.broken: list[int] = []

    async def start(self, tokens: int) -> None:
        """Return once the stream has begun."""
        await self._group.start(self._read, tokens)

    async def _read(self, tokens: int, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        request = QUESTION | {"max_tokens": tokens, "stream": True}
        async with (
            self._server.client() as client,
            client.stream("POST", "/v1/completions", json=request) as response,
        ):
            assert response.status_code == 200
            pieces = []
            async for piece in response.aiter_text():
                if not pieces:
                    task_status.started()
                pieces.append(piece)
        self.texts[tokens] = "".join(pieces)

    def ends(self, tokens: int) -> str:
        """How a stream ended: complete, or a typed error; anything else fails the test."""
        events = events_of(self.texts[tokens])
        if "error" in events[-1]:
            assert events[-1]["error"]["type"] == "service_unavailable_error"
            assert events[-1]["error"]["code"] == "draining"
            assert events[-1]["error"]["message"].endswith(" (draining)")
            return "error"
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return "complete"


@pytest.mark.parametrize("attempt", THREE)
async def test_I1_before_the_weights_are_loaded(checkpoint, tmp_path, attempt):
    go = tmp_path / "go"
    environment = {"ODD_LOAD_UNTIL": str(go)}
    async with serving_process(checkpoint, *every_other(attempt + 1), prefix=ODD, environment=environment) as server:
        await server.listening()
        async with server.client() as client:
            for path, status in {"/livez": 200, "/readyz": 503, "/health": 503, "/startupz": 503}.items():
                answer = await client.get(path)
                assert (path, answer.status_code) == (path, status)
                assert ("retry-after" in answer.headers) == (status == 503)
            for stream in (False, True):
                refused = await client.post("/v1/completions", json=QUESTION | {"stream": stream})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                assert refused.headers["x-should-retry"] == "true"
            go.touch()
            await server.ready()
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.post("/v1/completions", json=QUESTION)).status_code == 200


@pytest.mark.parametrize("attempt", THREE)
async def test_I1_a_signal_ends_the_loading(checkpoint, tmp_path, attempt):
    environment = {"ODD_LOAD_UNTIL": str(tmp_path / "never")}
    async with serving_process(checkpoint, *every_other(attempt), prefix=ODD, environment=environment) as server:
        await server.listening()
        server.signal(signal.SIGTERM)
        # The load never ends by itself, so that the server ends at all shows it; how soon is up to the machine's load.
        assert await server.exit_code(START_SECONDS) == 0


@pytest.mark.parametrize("attempt", TWENTY)
async def test_I2_streams_that_end_in_time_finish_normally(checkpoint, attempt):
    flags = ("--shutdown-timeout", "20", *every_other(attempt))
    body = http_request("/v1/completions", b'{"mo', content_length="100")
    async with ready_process(checkpoint, *flags, prefix=ODD, environment=PACE) as server:
        with await raw_socket(server.port, body) as late:
            async with anyio.create_task_group() as group, server.client() as client:
                answers = Answers(server, group)
                for tokens in (100, 101):
                    await answers.start(tokens)
                await server.until(server.in_flight, 3)
                server.signal(signal.SIGTERM)
                with anyio.fail_after(5):
                    while (ready := await client.get("/readyz")).status_code == 200:
                        pass
                refused = await client.post("/v1/completions", json=QUESTION)
                alive = await client.get("/livez")
            unread = await late.read_all()
        assert await server.exit_code(20 + GRACE_SECONDS) == 0
    assert ready.status_code == 503
    assert ready.json()["reasons"]
    assert alive.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (refused.headers["connection"], refused.headers["x-should-retry"]) == ("close", "true")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert unread.startswith(b"HTTP/1.1 503 ")
    assert b"draining" in unread
    assert [answers.ends(tokens) for tokens in (100, 101)] == ["complete", "complete"]


@pytest.mark.parametrize("attempt", TWENTY)
async def test_I3_streams_longer_than_the_drain_are_told(checkpoint, attempt):
    flags = ("--shutdown-timeout", "1", *every_other(attempt + 1))
    async with (
        ready_process(checkpoint, *flags, prefix=ODD, environment=PACE) as server,
        anyio.create_task_group() as group,
    ):
        answers = Answers(server, group)
        for tokens in (30, 3900, 3901):
            await answers.start(tokens)
        server.signal(signal.SIGTERM)
        assert await server.exit_code(1 + GRACE_SECONDS + NOTICE_SECONDS) == 0
    assert [answers.ends(tokens) for tokens in (30, 3900, 3901)] == ["complete", "error", "error"]


@pytest.mark.parametrize("attempt", TWENTY)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_I4_a_second_signal_aborts(checkpoint, attempt, number):
    flags = ("--shutdown-timeout", "60", *every_other(attempt + 1))
    async with (
        ready_process(checkpoint, *flags, prefix=ODD, environment=PACE) as server,
        anyio.create_task_group() as group,
    ):
        answers = Answers(server, group)
        await answers.start(3900)
        server.signal(number)
        async with server.client() as client:
            while (await client.get("/readyz")).status_code == 200:
                pass
        server.signal(number)
        assert await server.exit_code(ABORT_SECONDS + NOTICE_SECONDS) == 128 + number
    assert answers.ends(3900) == "error"


@pytest.mark.parametrize("attempt", TWENTY)
async def test_I5_a_stalled_client_holds_nothing_up(checkpoint, attempt):
    async with ready_process(checkpoint, "--shutdown-timeout", "1") as server:
        request = QUESTION | {"max_tokens": 3900, "stream": True, "logprobs": 20}
        with await raw_socket(server.port, http_request("/v1/completions", request), receive_buffer=4096):
            await server.until(partial(server.metric, "troupellm_streams_stalled"), 1)
            server.signal(signal.SIGTERM)
            assert await server.exit_code(1 + GRACE_SECONDS + NOTICE_SECONDS) == 0
    assert server.logged("1 were ended early, 1 of them without taking the news")


@pytest.mark.parametrize("attempt", TWENTY)
async def test_I5_a_stopped_worker_process_holds_nothing_up(checkpoint, attempt):
    """Nor does its spare, which all but the first attempt wait for."""
    spare = attempt > 0
    async with (
        ready_process(checkpoint, "--shutdown-timeout", "1", spare=spare) as server,
        anyio.create_task_group() as group,
    ):
        workers = server.workers()
        if not workers:
            pytest.skip("the worker is a thread here")
        if spare:
            await server.with_spare()
        children = server.note_children()
        answers = Answers(server, group)
        await answers.start(3900)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        assert await server.exit_code(1 + GRACE_SECONDS + NOTICE_SECONDS) in (0, 1)
        with anyio.fail_after(GRACE_SECONDS):
            while alive(children):  # noqa: ASYNC110 - other processes' state
                await anyio.sleep(0.01)
    assert answers.ends(3900) in ("error", "complete")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
async def test_I5_a_hung_step_holds_nothing_up(checkpoint, tmp_path, attempt):
    hang = tmp_path / "hang"
    flags, environment = ("--shutdown-timeout", "1", *every_other(attempt)), PACE | {"ODD_HANG_WHEN": str(hang)}
    async with (
        ready_process(checkpoint, *flags, prefix=ODD, environment=environment) as server,
        anyio.create_task_group() as group,
    ):
        answers = Answers(server, group)
        await answers.start(3900)
        hang.touch()
        server.signal(signal.SIGTERM)
        assert await server.exit_code(1 + GRACE_SECONDS + NOTICE_SECONDS) in (0, 1)
    assert answers.ends(3900) == "error"
