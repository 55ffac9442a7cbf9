"""The canaries themselves: they must notice what they are there for."""

import math
import os
from array import array

import anyio
import pytest

from troupellm.protocol.messages.worker import RowLogprobs, StepResult
from troupellm.tests.support.servers.canary import TOLERANCE, Attacked, rounds, under_attack
from troupellm.tests.support.servers.serving import eventually, http_request
from troupellm.tests.support.workers.meddler import WorkerHosts, changed

pytestmark = pytest.mark.anyio

NOTICED_SECONDS = 30.0
LEFT_BEHIND = 12
JSON = {"content-type": "application/json"}
ENDLESS = {"model": "tiny", "prompt": "Once", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}


def other_tokens(result: StepResult) -> StepResult:
    return changed(result, tokens=tuple(token ^ 1 for token in result.tokens))


def shifted(result: StepResult, by: float) -> StepResult:
    def entry(given: RowLogprobs) -> RowLogprobs:
        values = array("f", given.logprobs)
        return changed(given, logprobs=array("f", [value - by for value in values]).tobytes())

    return changed(result, logprobs=tuple(map(entry, result.logprobs)))


async def noticed(engine, harm) -> bool:
    """Whether a canary fails before the attack, which would never end, is over."""
    failed = False
    try:
        async with under_attack(engine, canary_tokens=20) as attacked:
            harm(attacked)
            with anyio.fail_after(NOTICED_SECONDS):
                await anyio.sleep_forever()
    except* AssertionError:
        failed = True
    return failed


@pytest.mark.parametrize(
    "worse", [other_tokens, lambda result: shifted(result, 5 * TOLERANCE)], ids=["tokens", "log-probabilities"]
)
async def test_canaries_notice_other_answers(tiny_engine, worse):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine:

        def harm(attacked: Attacked) -> None:
            hosts.worker.on_result = worse

        assert await noticed(engine, harm)


async def test_canaries_forgive_what_float32_cannot_tell(tiny_engine):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine, canary_tokens=20) as attacked:
        hosts.worker.on_result = lambda result: shifted(result, TOLERANCE / 10)
        sung = attacked.answered["long"]
        with anyio.fail_after(NOTICED_SECONDS):
            while attacked.answered["long"] < sung + 2:  # noqa: ASYNC110 - plain numbers without change events
                await anyio.sleep(0.005)


async def test_a_canary_that_rests_sings_once_more_behind_the_attack(tiny_engine):
    async with tiny_engine() as engine:
        async with under_attack(engine, canary_tokens=20, rest=math.inf) as attacked:
            await eventually(lambda: attacked.answered["long"] == 1, NOTICED_SECONDS)
        assert attacked.answered["long"] == 2


async def test_descriptors_and_tasks_left_by_an_attack_are_noticed(tiny_engine):
    opened: list[int] = []
    told: list[str] = []
    async with tiny_engine() as engine, anyio.create_task_group() as group:
        try:
            async with under_attack(engine, canary_tokens=20):
                for _ in range(LEFT_BEHIND):
                    opened.append(os.open(os.devnull, os.O_RDONLY))
                    group.start_soon(anyio.sleep_forever)
        except* AssertionError as errors:
            told += map(str, leaves(errors))
        for descriptor in opened:
            os.close(descriptor)
        group.cancel_scope.cancel()
    (text,) = told
    assert "'tasks': " in text
    assert "'descriptors': " in text


def leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in leaves(part)]


async def test_memory_does_not_grow_with_the_rounds_of_an_attack(tiny_engine):
    """A little of everything: what is no JSON, what is out of range, what is too large, and clients that leave."""
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=20) as attacked:

        async def attack() -> None:
            for body in (b"{", b"[" * 100_000, b'{"model": NaN}', b"\xff" * 100_000):
                answer = await attacked.client.post("/v1/completions", content=body, headers=JSON)
                assert answer.status_code == 400, answer.text
            for fields in ({"n": 10**9}, {"temperature": -1}, {"logit_bias": {"99999": 1}}, {"prompt": "x" * 10**6}):
                answer = await attacked.client.post("/v1/completions", json=ENDLESS | fields)
                assert answer.status_code == 400, answer.text
            async with anyio.create_task_group() as group:
                for number in range(16):
                    group.start_soon(leave, attacked, number)

        await rounds(attack)


async def leave(attacked: Attacked, number: int) -> None:
    connection = await attacked.served.raw(http_request("/v1/completions", ENDLESS | {"n": 1 + number % 3}))
    await connection.read_until(b"data: ")
    await connection.close()
