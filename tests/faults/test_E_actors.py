"""Rows E4, E5, E6 and E7 of the fault table on the real engine: a crash of any actor at any message answers all
requests."""

import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import anyio
import httpx
import pytest

from troupellm.actors.engine import wiring
from troupellm.actors.engine.edges import SUPERVISION
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.errors import EngineStopped, RequestFailed, TroupeError, WorkerCrashed
from troupellm.protocol.params.guide import GuideSpec
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.engines.inside import runner_of, system_of
from troupellm.tests.support.servers import odd_server
from troupellm.tests.support.servers.canary import under_attack
from troupellm.tests.support.servers.processes import ON_A_THREAD, ready_process
from troupellm.tests.support.servers.serving import eventually, running_server
from troupellm.tests.support.workers.meddler import MARKER, WorkerHosts

pytestmark = pytest.mark.anyio

PLAIN = {"temperature": 0.0, "ignore_eos": True}
READERS = 6
LONG = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENT_SECONDS = 200.0
"""For a worker process that comes back three times, on a busy machine."""
RESTARTED = [name for name, rule in SUPERVISION.items() if rule.strategy == "restart" and name != "media"]
"""The media actor runs for models that see images alone."""
READ = ("adapters", "guide", "intake", "output")
"""Actors that requests pass."""
STOPPED = [name for name, rule in SUPERVISION.items() if rule.strategy == "stop"]


class Injected(RuntimeError):
    pass


def crash_at(box: Mailbox, message: int) -> list[int]:
    """The consumer breaks over its n-th message (or wait, where it takes none); the list is empty once it has."""
    left, turns = [1], count(1)
    name = "wait" if box.name in ("stalls", "watchdog") else "take"
    original = getattr(box, name)

    def struck() -> bool:
        if left and next(turns) >= message:
            left.clear()
            return True
        return False

    def take():
        taken = original()
        if taken is not None and struck():
            raise Injected(f"{box.name} broke")
        return taken

    async def wait(timeout=None):
        if struck():
            raise Injected(f"{box.name} broke")
        return await original(timeout)

    setattr(box, name, wait if name == "wait" else take)
    return left


async def ask_many(engine, *, actor: str = "") -> list[object]:
    """By reader: the tokens of its answer, or the error it was told."""
    answers: list[object] = [None] * READERS

    async def ask(number: int) -> None:
        try:
            fields = PLAIN
            if actor == "guide":
                fields = {"guide": GuideSpec(kind="choice", source=f'["{"ab" * number}c"]')}
            elif actor == "adapters":
                fields = PLAIN | {"adapter": f"lora-{number % 2}"}
            answers[number] = (await engine.generate([20 + number, 5], max_tokens=12, **fields)).token_ids
        except TroupeError as error:
            answers[number] = error

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for number in range(READERS):
                group.start_soon(ask, number)
    return answers


@pytest.mark.parametrize("actor", RESTARTED)
async def test_E4_an_actor_that_falls_is_restarted_and_everybody_is_answered(tiny_engine, monkeypatch, tmp_path, actor):
    monkeypatch.setattr("troupellm.actors.engine.watchdog.LOOK_SECONDS", 0.05)
    for seed in range(2):
        write_tiny_adapter(tmp_path / f"lora-{seed}", seed)
    lora = {"enable_lora": True, "lora_dir": [str(tmp_path)]} if actor == "adapters" else {}
    async with tiny_engine(stall_timeout=0.2, **lora) as engine:
        solo = await ask_many(engine, actor=actor)
        system = system_of(engine)
        box = getattr(system, actor, None) or getattr(system._boxes, actor)
        for message in (1, 4):
            left = crash_at(box, message)
            answers = await ask_many(engine, actor=actor)
            await eventually(lambda left=left: not left)
            for answer, right in zip(answers, solo, strict=True):
                allowed = isinstance(answer, EngineStopped | RequestFailed) and actor in READ
                assert answer == right or (allowed and answer.code != "engine_failed"), answer
            assert await ask_many(engine, actor=actor) == solo
        assert system._supervisor.restarts[actor] == 2
        assert engine.state == "ready"


@pytest.mark.parametrize("message", [1, 5])
@pytest.mark.parametrize("actor", STOPPED)
async def test_E4_an_actor_that_cannot_come_back_ends_the_engine_within_a_second(tiny_engine, actor, message):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        solo = await ask_many(engine)
        left = crash_at(getattr(system_of(engine), actor), message)
        with anyio.fail_after(20):
            answers = await ask_many(engine)
        assert not left
        for answer, right in zip(answers, solo, strict=True):
            assert answer == right or isinstance(answer, EngineStopped | WorkerCrashed), answer
        assert any(isinstance(answer, TroupeError) and answer.code == "engine_failed" for answer in answers)
        assert engine.state == "failed"
        assert isinstance(engine.failure, Injected)
        assert f"actor: {actor}" in engine.failure.__notes__
        assert (await client.get("/livez")).status_code == 503
        refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")


class OneMessage(Mailbox):
    """As narrow as a sender that waits allows."""

    def __init__(self, name: str, capacity: int, **options) -> None:
        super().__init__(name, 1 if name in ("intake", "output", "metrics") else capacity, **options)


async def test_E7_mailboxes_of_one_message_deadlock_nobody(tiny_engine, monkeypatch):
    monkeypatch.setattr(wiring, "Mailbox", OneMessage)
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=60):
        solo = await ask_many(engine)
        most = {}

        async def leave(number: int) -> None:
            with anyio.move_on_after(0.002 * number):
                await engine.generate([number + 40], max_tokens=300, n=3, **PLAIN)

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(leave, number)
            for _ in range(3):
                assert await ask_many(engine) == solo
                for actor in engine.snapshot().actors:
                    for box in actor.mailboxes:
                        most[box.name] = max(most.get(box.name, 0), box.depth - box.capacity)
        assert {name: over for name, over in most.items() if over > 0 and name != "scheduler"} == {}
        assert system_of(engine).output.capacity == 1


async def test_E6_NaN_logits_fail_the_request_that_has_them(tiny_engine):
    """A token whose embedding is NaN makes everything behind it NaN: alone, streamed, in forks, and over again."""
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine, canary_tokens=60) as attacked:
        spare = engine.ready.vocab_width - 1  # of the padding, which the canaries have no use for
        runner_of(hosts.worker).decoder.embedding.table[spare] = float("nan")
        body = {"model": "tiny", "prompt": [*MARKER, spare, 5], "max_tokens": 8} | PLAIN
        for fields in ({}, {"stream": True}, {"n": 3, "temperature": 1.0}, {"prompt": [spare]}):
            answer = await attacked.client.post("/v1/completions", json=body | fields)
            text = answer.text
            assert "NaN or infinite logits" in text, text
            assert '"code":"engine_request_failed"' in text, text
            if not fields.get("stream"):
                assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
        assert engine.snapshot().scheduler.worker_losses == 0
    assert hosts.worker.resets == 0


LOOPS = [
    (0, ON_A_THREAD),
    *(pytest.param(number, flags, marks=LONG) for number in (1, 2) for flags in (ON_A_THREAD, ())),
]


@pytest.mark.parametrize(("attempt", "flags"), LOOPS)
async def test_E5_the_server_of_a_crash_loop_exits_with_code_1(checkpoint, tmp_path, attempt, flags):
    """After sixteen losses without a step the command ends by itself, and says why in one line. Where every loss costs
    the seconds in which a process starts, three are enough here, in a longer time."""
    odd = [sys.executable, str(Path(odd_server.__file__))]
    environment = {"ODD_FAIL_WHEN": str(tmp_path / "fail")} | ({} if flags else {"ODD_LOSSES": "3"})
    async with (
        ready_process(checkpoint, *flags, prefix=odd, environment=environment) as server,
        server.client(timeout=PATIENT_SECONDS) as client,
    ):
        (tmp_path / "fail").touch()
        told = []

        async def ask(number: int) -> None:
            body = {"model": "tiny", "prompt": [number + 5], "max_tokens": 4}
            with suppress(httpx.TransportError):  # the end may come while it is asked
                told.append((await client.post("/v1/completions", json=body)).status_code)

        async with anyio.create_task_group() as group:
            for number in range(24):
                group.start_soon(ask, number)
        assert await server.exit_code(30 if flags else PATIENT_SECONDS) == 1
        assert set(told) <= {500, 503}
        assert 503 in told
    assert server.logged("odd: every step fails")
