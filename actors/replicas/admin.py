"""A fleet's state and metrics, and the commands that go to all of its replicas."""

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

import anyio
import msgspec

from troupellm.actors.admission.admission import Admission
from troupellm.actors.metrics.families import families, text_of
from troupellm.actors.replicas.merged import (
    FAILOVERS,
    OF_ONE,
    REJECTED,
    REPLICAS,
    merged_answer,
    merged_metrics,
    merged_snapshot,
)
from troupellm.actors.replicas.replica import Replica
from troupellm.actors.replicas.router import Router
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import EngineStopped, InvalidRequest, TroupeError
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.messages.snapshot import EngineSnapshot, ReplicaSnapshot


class FleetAdmin:
    """The part of `Fleet` beside its life and its requests."""

    config: EngineConfig
    replicas: Sequence[Replica]
    _router: Router
    _admission: Admission
    _rejected: Counter[str]

    @property
    @abstractmethod
    def state(self) -> str: ...

    @abstractmethod
    async def restart(self) -> None: ...

    @abstractmethod
    def _refusal(self) -> EngineStopped: ...

    def snapshot(self) -> EngineSnapshot:
        """The sum of what the replicas last reported, and each of them by itself in `replicas`."""
        there = [each.status.snapshot for each in self.replicas if each.state == "ready" and each.status is not None]
        return merged_snapshot(
            there,
            self._replica_snapshots(),
            state=self.state,
            open_requests=len(self._router),
            tenants=self._admission.quotas.snapshot(),
        )

    def missing(self) -> list[str]:
        """The replicas that do not serve just now, and why: their process or its model worker is gone."""
        return [f"replica {each.number}: {each.unready}" for each in self.replicas if each.unready is not None]

    def absent(self) -> list[str]:
        """The replicas that have no process to hear of a command, and why."""
        return [f"replica {each.number}: {each.reason}" for each in self.replicas if each.state != "ready"]

    async def metrics(self, *, compat: bool) -> bytes:
        """Prometheus' text format; the samples of each replica have its number as `engine`.

        Raises:
            EngineStopped: no replica answers.
        """
        texts: list[bytes] = []

        async def ask(replica: Replica) -> None:
            try:
                texts.append(await replica.queries.metrics(compat=compat))
            except EngineStopped:  # it dies or hangs, which its watch sees
                return

        async with anyio.create_task_group() as group:
            for replica in self.replicas:
                if replica.state == "ready":
                    group.start_soon(ask, replica)
        if not texts:
            raise self._refusal()
        own = (
            *families(REPLICAS, self._replica_snapshots()),
            *families(FAILOVERS, self._router.failovers),
            *families(REJECTED, self._rejected),
        )
        return merged_metrics(texts) + text_of(own)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        return await self._any().queries.list_adapters() if self.config.lora.enabled else ()

    async def find_adapter(self, name: str) -> AdapterInfo:
        return await self._any().queries.find_adapter(name)

    async def administer(self, action: str, arguments: bytes) -> bytes:
        """Run an admin route's action in every replica, or in one if it changes nothing.

        Raises:
            EngineStopped: a replica is not ready, and would not hear of the change.
            TroupeError: why it was not done.
        """
        if action == "snapshot":
            return msgspec.json.encode(self.snapshot())
        if action == "kv_events":
            return await self._replica_named(arguments).queries.administer(action, arguments)
        if action == "restart_replicas":
            await self.restart()
            return b'{"success":true}'
        if action in OF_ONE:
            return await self._any().queries.administer(action, arguments)
        if absent := self.absent():
            raise EngineStopped(f"not all replicas are ready: {'; '.join(absent)}", code="engine_restarting")
        if action == "set_log_level":
            level = str(msgspec.json.decode(arguments)["level"])
            logging.getLogger("troupellm").setLevel(level.upper())
        answers: dict[int, bytes] = {}
        errors: list[TroupeError] = []

        async def ask(replica: Replica) -> None:
            try:
                answers[replica.number] = await replica.queries.administer(action, arguments)
            except TroupeError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for replica in self.replicas:
                group.start_soon(ask, replica)
        if errors:
            raise errors[0]
        return merged_answer(action, [answers[each.number] for each in self.replicas])

    def _replica_named(self, arguments: bytes) -> Replica:
        """The replica that a question is for, which names it."""
        number: int | None = msgspec.json.decode(arguments).get("replica")
        most = len(self.replicas) - 1
        if number is None or not 0 <= number <= most:
            text = f"replica must be in 0..{most}, got {number}: each replica has events of its own"
            raise InvalidRequest(text, param="replica")
        if self.replicas[number].state != "ready":
            raise EngineStopped(f"replica {number}: {self.replicas[number].reason}", code="engine_restarting")
        return self.replicas[number]

    def _any(self) -> Replica:
        for replica in self.replicas:
            if replica.state == "ready":
                return replica
        raise self._refusal()

    def _replica_snapshots(self) -> list[ReplicaSnapshot]:
        return [
            ReplicaSnapshot(
                number=each.number,
                pid=each.pid,
                state=each.state,
                reason=each.unready or "",
                restarts=each.restarts,
                requests=len(each.requests),
                work=0 if each.place is None else each.place.work,
                known_blocks=0 if each.place is None else len(each.place),
            )
            for each in self.replicas
        ]
