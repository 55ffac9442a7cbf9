"""Rows E1, E2, E9, E10 and E12 of the fault table where the worker is a process of its own.

No client may notice: streams that were running end with the tokens of their solo run.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import troupellm
from troupellm import Engine
from troupellm.actors.runtime.processes import SystemProcesses
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.processes import alive
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually, with_spare
from troupellm.tests.support.workers.faulty_worker import FACTORY, POISON

pytestmark = pytest.mark.anyio

TWENTY = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 21))]
PROCESS: dict[str, Any] = SETTINGS | {"worker_process": True}
ALONE: dict[str, Any] = PROCESS | {"spare_worker": False}
"""Without a spare process, which would import torch meanwhile, in tests that do not need it."""
HARMS = ("sleep", "crash", "exit", "fail")
STREAMS = 16
LENGTH = 150
GONE_SECONDS = 2.0
DETECTED_SECONDS = 10.0
"""The row wants one second, which this prints; the bound tells a busy machine from who waits for a deadline."""
HOST = Path(__file__).parents[1] / "support" / "engines" / "embedding_host.py"


def prompt(number: int) -> list[int]:
    return [40 + number, 41, 42 + number % 7]


def sampling(number: int) -> dict[str, Any]:
    """Every other one is drawn, with a seed."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    return drawn | {"max_tokens": LENGTH, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder of this test's own, for faults to be put in."""
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> dict[int, tuple[int, ...]]:
    """The tokens of every stream, alone on a worker thread."""

    async def run() -> dict[int, tuple[int, ...]]:
        async with Engine(checkpoint, **SETTINGS) as engine:
            return {
                number: (await engine.generate(prompt(number), **sampling(number))).token_ids
                for number in range(STREAMS)
            }

    return anyio.run(run)


class Crowd:
    """Streams that must have the tokens of their solo runs in spite of all faults."""

    def __init__(self, engine: Engine, solo: dict[int, tuple[int, ...]], size: int = STREAMS) -> None:
        self._engine, self._solo, self._size = engine, solo, size
        self.num_tokens = [0] * size

    async def run(self, attack: Any) -> None:
        async with anyio.create_task_group() as group:
            for number in range(self._size):
                group.start_soon(self._read, number)
            await eventually(lambda: min(self.num_tokens) > 2, SPARE_SECONDS)
            await attack()

    async def _read(self, number: int) -> None:
        tokens: list[int] = []
        async with self._engine.stream(prompt(number), **sampling(number)) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                self.num_tokens[number] = len(tokens)
        assert tuple(tokens) == self._solo[number]


def losses(engine: Engine) -> int:
    return engine.snapshot().scheduler.worker_losses


async def detected(engine: Engine) -> None:
    began = time.perf_counter()
    await eventually(lambda: losses(engine) == 1, DETECTED_SECONDS)
    print(f"found after {time.perf_counter() - began:.2f} s")


@pytest.mark.slow  # make test has it of a worker on a thread, in `test_E_engine`
@pytest.mark.parametrize("attempt", range(20))
async def test_E1_streams_go_on_after_their_worker_was_killed(checkpoint, solo, attempt):
    async with Engine(checkpoint, **PROCESS) as engine, under_attack(engine):
        await with_spare(engine)
        crowd = Crowd(engine, solo)

        async def kill() -> None:
            killed = engine.snapshot().worker_pid
            os.kill(killed, signal.SIGKILL)
            await detected(engine)
            before = sum(crowd.num_tokens)
            await eventually(lambda: sum(crowd.num_tokens) > before, SPARE_SECONDS)
            assert engine.snapshot().worker_pid not in (killed, None)
            assert not psutil.pid_exists(killed)

        await crowd.run(kill)
        assert engine.snapshot().scheduler.blamed == 0
        await with_spare(engine)


@pytest.mark.slow
async def test_E1_without_a_spare_and_while_idle(checkpoint, solo):
    async with Engine(checkpoint, **ALONE) as engine:
        os.kill(engine.snapshot().worker_pid, signal.SIGKILL)
        await detected(engine)
        assert engine.snapshot().spare_worker_pid is None
        assert (await engine.generate(prompt(0), **sampling(0))).token_ids == solo[0]


@pytest.mark.parametrize("attempt", TWENTY)
async def test_E2_a_stopped_worker_is_replaced(checkpoint, solo, attempt, monkeypatch):
    if not attempt:
        monkeypatch.setattr("troupellm.actors.worker.actor.LOOK_SECONDS", 0.1)
    async with Engine(checkpoint, **PROCESS) as engine, under_attack(engine):
        await with_spare(engine)

        async def stop() -> None:
            stopped = engine.snapshot().worker_pid
            os.kill(stopped, signal.SIGSTOP)
            await eventually(lambda: losses(engine) == 1, SPARE_SECONDS)
            await eventually(lambda: not psutil.pid_exists(stopped), SPARE_SECONDS)

        await Crowd(engine, solo).run(stop)
        assert engine.snapshot().scheduler.blamed == 0


def faults(*names: str) -> pytest.MarkDecorator:
    """The first without a spare, which is quicker; all of them with one, which must take over."""
    with_spares = (pytest.param(name, True, marks=pytest.mark.slow) for name in names)
    return pytest.mark.parametrize(("fault", "spare"), [(names[0], False), *with_spares])


@faults("spin", "exit", "sleep")
async def test_E2_a_worker_that_hangs_or_ends_by_itself_is_replaced(folder, solo, fault, spare):
    async with Engine(folder, worker=FACTORY, **PROCESS, spare_worker=spare, step_timeout=3.0) as engine:
        successor = await with_spare(engine) if spare else None
        await Crowd(engine, solo, 4).run(lambda: put_fault(engine, folder, fault))
        assert engine.snapshot().scheduler.blamed == 0
        assert successor in (None, engine.snapshot().worker_pid)


@faults("oversized", "truncated", "unknown", "pickle")
async def test_E9_broken_frames_cost_the_worker_and_no_request(folder, solo, fault, spare):
    async with Engine(folder, worker=FACTORY, **PROCESS, spare_worker=spare) as engine:
        successor = await with_spare(engine) if spare else None
        await Crowd(engine, solo, 4).run(lambda: put_fault(engine, folder, fault))
        assert successor in (None, engine.snapshot().worker_pid)


async def put_fault(engine: Engine, folder: Path, fault: str) -> None:
    (folder / "fault").write_text(fault)
    await eventually(lambda: losses(engine) == 1, SPARE_SECONDS)


class OtherModule(SystemProcesses):
    """Starts something that is no worker of this version."""

    def __init__(self, module: str) -> None:
        self._module = module

    async def start(self, module, events):
        return await super().start(self._module, events)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("troupellm.tests.support.workers.stranger_old", "has version '0.0.0/0'"),
        pytest.param(
            "troupellm.tests.support.workers.stranger_http", "does not speak this protocol", marks=pytest.mark.slow
        ),
    ],
)
async def test_E9_a_foreign_peer_is_refused(checkpoint, module, why, strangers):
    before: list[set[str]] = []
    for _ in range(2):  # the event loop keeps a descriptor from its first pipe on
        with pytest.raises(troupellm.TroupeError, match=why):
            async with Engine(checkpoint, **PROCESS, processes=OtherModule(module)):
                pass
        assert set(psutil.Process().children()) <= strangers
        before.append(descriptors())
    await eventually(lambda: descriptors() == before[0], 20)


@pytest.mark.slow  # make test has it of a worker on a thread, in `test_E_engine`
async def test_E10_a_poison_request_fails_alone(folder):
    async with Engine(folder, worker=FACTORY, **PROCESS) as engine, under_attack(engine, canary_tokens=30) as attacked:
        await with_spare(engine)

        body = {"model": "tiny", "prompt": [POISON, 50], "max_tokens": 5}
        answer = await attacked.client.post("/v1/completions", json=body)
        assert answer.status_code == 500, answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "engine_request_failed"
        assert engine.snapshot().scheduler.blamed == 1


class Kernel(SystemProcesses):
    """Counts the kernel's out-of-memory kills by the size of a file."""

    def __init__(self, count: Path) -> None:
        self._count = count

    def oom_kills(self) -> int:
        return self._count.stat().st_size


@pytest.mark.slow
async def test_E10_a_request_that_makes_the_kernel_kill_for_want_of_memory_fails_alone(folder):
    count = folder / "oom_kills"
    count.touch()
    settings = PROCESS | {"processes": Kernel(count)}
    async with Engine(folder, worker=FACTORY, **settings) as engine, under_attack(engine, canary_tokens=30) as attacked:
        await with_spare(engine)
        body = {"model": "tiny", "prompt": [POISON, 50], "max_tokens": 5}
        answer = await attacked.client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert engine.snapshot().scheduler.blamed == 1
        assert engine.snapshot().scheduler.worker_losses == count.stat().st_size


@pytest.mark.parametrize("fault", ["spin", *(pytest.param(name, marks=pytest.mark.slow) for name in ("", "sleep"))])
async def test_E12_no_worker_outlives_its_parent(folder, fault):
    host = subprocess.Popen(
        [sys.executable, HOST, folder, fault],
        stdout=subprocess.PIPE,
        text=True,
    )
    with host:
        children = [int(pid) for pid in (await anyio.to_thread.run_sync(host.stdout.readline)).split()]
        assert len(children) == 2
        assert alive(set(children)) == set(children)
        host.kill()
    with anyio.fail_after(GONE_SECONDS):
        while alive(set(children)):  # noqa: ASYNC110 - other processes' state
            await anyio.sleep(0.01)


@pytest.fixture
def strangers() -> set[psutil.Process]:
    """Children that stood before the test, such as the tracker that an earlier process pool left to Python."""
    return set(psutil.Process().children())


def descriptors() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def workers():
    """Worker processes of this one; a process that compiles guides may stand beside them."""
    return [child for child in psutil.Process().children() if "troupellm.models.worker.main" in child.cmdline()]


async def test_starting_and_stopping_leaves_nothing(checkpoint, tmp_path, strangers):
    async with Engine(checkpoint, **PROCESS):
        pass
    before, threads = descriptors(), threading.active_count()
    async with Engine(checkpoint, **PROCESS) as engine:
        assert len((await engine.generate("x", max_tokens=3, ignore_eos=True)).token_ids) == 3
        await with_spare(engine)
        assert len(workers()) == 2
    assert set(psutil.Process().children()) <= strangers
    await eventually(lambda: descriptors() == before, 20)
    assert threading.active_count() == threads
    with pytest.raises(troupellm.ModelLoadError):
        async with Engine(tmp_path / "no model", **PROCESS):
            pass
    with anyio.move_on_after(0.2) as scope:
        async with Engine(checkpoint, **PROCESS):
            raise AssertionError("it cannot have started")
    assert scope.cancelled_caught
    assert set(psutil.Process().children()) <= strangers
    await eventually(lambda: descriptors() == before, 20)


@pytest.mark.parametrize(
    "settings", [{"max_model_len": 10**9}, pytest.param({"kv_cache_memory_bytes": 1}, marks=pytest.mark.slow)]
)
async def test_errors_of_loading_are_the_same_from_a_process_and_a_thread(checkpoint, settings):
    told = []
    for process in (False, True):
        with pytest.raises(troupellm.TroupeError) as caught:
            async with Engine(checkpoint, **(PROCESS | settings | {"worker_process": process})):
                pass
        told.append((type(caught.value), caught.value.message, caught.value.param, caught.value.code))
    assert told[0] == told[1]


async def test_output_of_the_worker_is_logged_line_by_line(folder, caplog):
    async with Engine(folder, worker=FACTORY, **ALONE) as engine:
        (folder / "fault").write_text("speak")
        await engine.generate("x", max_tokens=3)
        pid = engine.snapshot().worker_pid
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if line.startswith("[")] == [
        f"[{pid}] a word from the worker",
        f"[{pid}] and another",
    ]


@pytest.mark.slow  # which every row above compares on its way
@pytest.mark.parametrize("overlap", [True, False])
async def test_a_process_gives_the_tokens_of_a_thread(checkpoint, solo, overlap):
    settings = {"async_scheduling": overlap, "max_plans_in_flight": 2}
    for process in (True, False):
        async with Engine(checkpoint, **(ALONE | settings | {"worker_process": process})) as engine:
            await Crowd(engine, solo).run(anyio.lowlevel.checkpoint)


async def test_a_function_cannot_make_a_worker_in_another_process(checkpoint):
    with pytest.raises(troupellm.ConfigError, match="import path"):
        async with Engine(checkpoint, worker=lambda folder: None, **PROCESS):
            pass
