"""Rows E1, E2, E3, E5, E6, E9 and E10 of the fault table on the real server, whose worker is a process of its own.

No client may notice: streams that were running end with the tokens of their solo runs. The same rows on an embedded
engine are in `test_E_process`, `test_E_engine` and `test_E_replay`, which `make test` runs.
"""

import os
import signal
import sys
import time
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.servers.canary import beside_canaries
from troupellm.tests.support.servers.http_crowd import STREAMS, HttpCrowd, Solo, request, solo_runs
from troupellm.tests.support.servers.processes import START_SECONDS, ServerProcess, alive, ready_process
from troupellm.tests.support.workers.faulty_worker import FACTORY, POISON, REPLIES, SICK

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

TWENTY = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 21))]
ODD = (sys.executable, str(Path(__file__).parents[1] / "support" / "servers" / "odd_server.py"))
FEW_STREAMS = 8
"""Of each kind one, in `make test`."""
PATIENT_SECONDS = 100.0
"""For answers that wait for another worker, which has to import everything on a busy machine."""
GIVEN_UP_SECONDS = 480.0
"""For the end of a crash loop, each turn of which loads a model."""


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> Solo:
    return solo_runs(checkpoint)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder of this test's own, for faults to be put in."""
    return write_tiny_model(tmp_path / "tiny")


def faulty_process(folder: Path, *flags: str, spare: bool = False) -> AbstractAsyncContextManager[ServerProcess]:
    """The server with a worker process that can be told to do harm."""
    return ready_process(folder, *flags, prefix=ODD, environment={"ODD_WORKER": FACTORY}, spare=spare)


async def lost(server: ServerProcess, losses: int = 1) -> None:
    """Until the server has noticed that its worker is of no more use."""
    began = time.perf_counter()
    await server.until(partial(server.metric, "troupellm_worker_restarts_total"), losses, START_SECONDS)
    print(f"found after {time.perf_counter() - began:.2f} s")


async def gone(pid: int) -> None:
    with anyio.fail_after(START_SECONDS):
        while alive({pid}):  # noqa: ASYNC110 - another process's state
            await anyio.sleep(0.01)


async def strike(server: ServerProcess, number: int) -> None:
    """Send the worker a signal that it does not survive, in one way or another."""
    struck = server.workers()[0]
    os.kill(struck, number)
    await lost(server)
    await gone(struck)
    assert struck not in server.workers()


async def put_fault(server: ServerProcess, folder: Path, fault: str) -> None:
    """For the worker to find as a whole."""
    (folder / "new fault").write_text(fault)
    os.replace(folder / "new fault", folder / "fault")
    await lost(server)


async def until_answer(client: httpx.AsyncClient, path: str, status: int) -> httpx.Response:
    with anyio.fail_after(START_SECONDS):
        while (answer := await client.get(path)).status_code != status:  # noqa: ASYNC110 - another process's state
            await anyio.sleep(0.01)
    return answer


def check_failed_for_good(answer: httpx.Response) -> None:
    assert answer.status_code == 500, answer.text
    assert answer.json()["error"]["code"] == "engine_request_failed"
    assert answer.headers["x-should-retry"] == "false"


async def check_nobody_was_blamed(server: ServerProcess) -> None:
    assert await server.metric("troupellm_replays_total") > 0, "no stream was met"
    assert await server.metric("troupellm_convicted_total") == 0


@pytest.mark.parametrize("attempt", TWENTY)
async def test_E1_streams_of_a_server_go_on_after_its_worker_was_killed(checkpoint, solo, attempt):
    async with ready_process(checkpoint, spare=True) as server:
        await server.with_spare()
        async with beside_canaries(server):
            crowd = HttpCrowd(server, solo, STREAMS if attempt else FEW_STREAMS)
            await crowd.run(lambda: strike(server, signal.SIGKILL))
            await check_nobody_was_blamed(server)
            async with server.client() as client:
                await until_answer(client, "/readyz", 200)
            await server.with_spare()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
async def test_E1_a_server_without_a_spare_says_that_it_is_not_ready_meanwhile(checkpoint, solo, attempt):
    async with (
        ready_process(checkpoint) as server,
        server.client(timeout=PATIENT_SECONDS) as client,
    ):
        os.kill(server.workers()[0], signal.SIGKILL)
        probe = await until_answer(client, "/readyz", 503)
        assert "engine_restarting" in probe.json()["reasons"][0]
        assert (await client.get("/livez")).status_code == 200
        answer = await client.post("/v1/completions", json=request(0))  # it waits, it is not refused
        assert answer.status_code == 200, answer.text
        assert tuple(answer.json()["choices"][0]["token_ids"]) == solo[0]
        assert (await client.get("/readyz")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
async def test_E2_a_server_replaces_a_worker_that_was_stopped(checkpoint, solo, attempt):
    async with ready_process(checkpoint, spare=True) as server:
        await server.with_spare()
        async with beside_canaries(server):
            await HttpCrowd(server, solo).run(lambda: strike(server, signal.SIGSTOP))
            await check_nobody_was_blamed(server)
            await server.with_spare()


HANGS = [
    *(("spin", number) for number in range(20)),
    *((fault, number) for fault in ("sleep", "exit", "crash") for number in range(3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "attempt"), HANGS)
async def test_E2_a_server_replaces_a_worker_that_hangs_or_ends_by_itself(folder, solo, fault, attempt):
    async with faulty_process(folder, "--step-timeout", "3", spare=True) as server:
        successor = await server.with_spare()
        async with beside_canaries(server):
            await HttpCrowd(server, solo, 4).run(lambda: put_fault(server, folder, fault))
            await check_nobody_was_blamed(server)
            assert server.workers()[0] == successor
            await server.with_spare()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
async def test_E3_a_row_of_a_server_that_cannot_go_on_fails_alone(folder, attempt):
    async with faulty_process(folder) as server, server.client() as client:
        async with beside_canaries(server):
            body = {"model": "tiny", "prompt": [SICK, 50], "max_tokens": 5, "ignore_eos": True}
            for fields in ({}, {"stream": True}, {"n": 3, "temperature": 1}):
                check_failed_for_good(await client.post("/v1/completions", json=body | fields))
        assert await server.metric("troupellm_worker_restarts_total") == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_E5_a_server_whose_worker_process_always_dies_gives_up_within_minutes(folder):
    """No client waits for ever, however long the model takes to load in each turn of the loop."""
    told: list[int] = []
    async with faulty_process(folder, spare=True) as server, server.client(timeout=GIVEN_UP_SECONDS) as client:
        await server.with_spare()
        (folder / "doomed").touch()

        async def ask(number: int) -> None:
            body = {"model": "tiny", "prompt": [number + 40], "max_tokens": 4}
            with suppress(httpx.TransportError):  # the end may come while it is asked
                told.append((await client.post("/v1/completions", json=body)).status_code)

        with anyio.fail_after(GIVEN_UP_SECONDS):
            async with anyio.create_task_group() as group:
                for number in range(24):
                    group.start_soon(ask, number)
        assert await server.exit_code(START_SECONDS) == 1
        assert set(told) <= {500, 503}
        assert 503 in told
        assert server.logged("the worker process ended with exit code 9")


NONSENSE = [("id out of range", 0, False), *((kind, number, True) for kind in REPLIES for number in range(3))]
"""The first without a spare process; all with one, which must take over."""


@pytest.mark.slow
@pytest.mark.parametrize(("reply", "attempt", "spare"), NONSENSE)
async def test_E6_nonsense_costs_a_server_its_worker_and_no_request(folder, solo, reply, attempt, spare):
    async with faulty_process(folder, spare=spare) as server:
        successor = await server.with_spare() if spare else None
        async with beside_canaries(server):
            await HttpCrowd(server, solo, 4).run(lambda: put_fault(server, folder, reply))
            await check_nobody_was_blamed(server)
            assert successor in (None, server.workers()[0])
            if spare:
                await server.with_spare()


FRAMES = [(name, number) for name in ("oversized", "truncated", "unknown", "pickle") for number in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(("frame", "attempt"), FRAMES)
async def test_E9_broken_frames_cost_a_server_its_worker_and_no_request(folder, solo, frame, attempt):
    async with faulty_process(folder, spare=True) as server:
        successor = await server.with_spare()
        async with beside_canaries(server):
            await HttpCrowd(server, solo, 4).run(lambda: put_fault(server, folder, frame))
            await check_nobody_was_blamed(server)
            assert server.workers()[0] == successor
            await server.with_spare()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
async def test_E10_a_poison_request_to_a_server_fails_alone(folder, attempt):
    async with (
        faulty_process(folder, spare=True) as server,
        server.client(timeout=PATIENT_SECONDS) as client,
    ):
        await server.with_spare()
        async with beside_canaries(server, canary_tokens=30):
            body = {"model": "tiny", "prompt": [POISON, 50], "max_tokens": 5}
            check_failed_for_good(await client.post("/v1/completions", json=body))
            assert await server.metric("troupellm_convicted_total") == 1
            assert await server.metric("troupellm_worker_restarts_total") >= 2
            await server.with_spare()
