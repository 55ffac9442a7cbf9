"""Queries of an API process to the engine's process beside requests: one message out, one answer back."""

from collections.abc import Callable
from itertools import count

import msgspec

from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.messages.adapters import AdapterInfo, AdaptersServed
from troupellm.protocol.quota import Quota
from troupellm.protocol.wire.api_process import (
    AdminAnswer,
    AskAdmin,
    AskCharge,
    AskMetrics,
    CancelAdmin,
    ChargeAnswer,
    FromApiProcess,
    MetricsText,
)

METRICS_SECONDS = 5.0
CHARGE_SECONDS = 5.0

Answer = MetricsText | AdminAnswer | ChargeAnswer


class Queries:
    def __init__(self, post: Callable[[FromApiProcess], None]) -> None:
        """post: queues a message for the engine's process, without waiting."""
        self._post = post
        self._numbers = count(1)
        self._open: dict[int, tuple[Waiter, list[Answer]]] = {}
        self._lost = False

    def __len__(self) -> int:
        """Queries without an answer."""
        return len(self._open)

    async def metrics(self, *, compat: bool) -> bytes:
        """
        Raises:
            EngineStopped: no answer in time.
        """
        answer = await self._ask(lambda query: AskMetrics(query, compat), METRICS_SECONDS)
        if not (isinstance(answer, MetricsText) and answer.text):
            raise _silent()
        return answer.text

    async def administer(self, action: str, arguments: bytes) -> bytes:
        """For as long as it takes; being cancelled takes it back.

        Raises:
            TroupeError: why it was not done.
        """
        asked: list[int] = []

        def ask(query: int) -> AskAdmin:
            asked.append(query)
            return AskAdmin(query=query, action=action, arguments=arguments)

        try:
            answer = await self._ask(ask, None)
        except BaseException:
            self._post(CancelAdmin(asked[0]))
            raise
        if not isinstance(answer, AdminAnswer):
            raise _silent()
        if answer.error is not None:
            raise answer.error.error()
        return answer.body

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """See `Engine.list_adapters`."""
        return msgspec.json.decode(await self.administer("list_adapters", b"{}"), type=AdaptersServed).adapters

    async def find_adapter(self, name: str) -> AdapterInfo:
        """See `Engine.find_adapter`."""
        arguments = msgspec.json.encode({"lora_name": name})
        return msgspec.json.decode(await self.administer("find_adapter", arguments), type=AdapterInfo)

    async def charge(self, tenant: str, tokens: int) -> Quota | None:
        """
        Raises:
            RateLimited: the tenant has reached a limit.
            EngineStopped: no answer in time.
        """
        answer = await self._ask(lambda query: AskCharge(query=query, tenant=tenant, tokens=tokens), CHARGE_SECONDS)
        if not isinstance(answer, ChargeAnswer):
            raise _silent()
        if answer.error is not None:
            raise answer.error.error()
        return answer.quota

    def answered(self, answer: Answer) -> None:
        if answer.query in self._open:
            waiter, answers = self._open[answer.query]
            answers.append(answer)
            waiter.wake()

    def lost(self) -> None:
        """The engine's process is gone: every open query ends without an answer."""
        self._lost = True
        for waiter, _ in self._open.values():
            waiter.wake()

    async def _ask(self, make: Callable[[int], FromApiProcess], seconds: float | None) -> Answer | None:
        if self._lost:
            return None
        query, waiter, answers = next(self._numbers), new_waiter(), list[Answer]()
        self._open[query] = waiter, answers
        try:
            self._post(make(query))
            await waiter.wait(seconds)
        finally:
            del self._open[query]
        return answers[0] if answers else None


def _silent() -> EngineStopped:
    return EngineStopped("the engine's process does not answer", code="engine_restarting")
