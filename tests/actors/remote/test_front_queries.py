"""Queries of a front beside requests: each answer finds its query, and no query waits for a process that is gone."""

from typing import Any

import anyio
import pytest

from troupellm.actors.remote.queries import Queries
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.wire.api_process import AdminAnswer, AskAdmin, AskMetrics, CancelAdmin, MetricsText

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(any_backend: object) -> object:
    return any_backend


async def test_each_answer_finds_its_question() -> None:
    said: list[Any] = []
    answers: list[bytes] = []
    queries = Queries(said.append)

    async def ask(call: Any) -> None:
        answers.append(await call)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, queries.metrics(compat=True))
        group.start_soon(ask, queries.administer("abort", b"{}"))
        await anyio.wait_all_tasks_blocked()
        assert {type(message) for message in said} == {AskMetrics, AskAdmin}
        for message in said:
            if isinstance(message, AskMetrics):
                queries.answered(MetricsText(message.query, b"text"))
            else:
                queries.answered(AdminAnswer(query=message.query, body=b"done"))
    assert sorted(answers) == [b"done", b"text"]


async def test_an_answer_that_comes_late_finds_nobody() -> None:
    said: list[Any] = []
    queries = Queries(said.append)
    with anyio.move_on_after(0) as scope:
        await queries.administer("abort", b"{}")
    assert scope.cancelled_caught
    assert [type(message) for message in said] == [AskAdmin, CancelAdmin]
    queries.answered(AdminAnswer(query=said[0].query, body=b"done"))
    assert len(queries) == 0


async def test_an_engine_that_is_gone_is_asked_nothing() -> None:
    said: list[Any] = []
    queries = Queries(said.append)
    queries.lost()
    for call in (queries.administer("abort", b"{}"), queries.metrics(compat=True)):
        with pytest.raises(EngineStopped):
            await call
    assert not said
