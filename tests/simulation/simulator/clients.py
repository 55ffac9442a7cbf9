"""Clients: each asks once, reads (or not), and leaves (or not)."""

from typing import TYPE_CHECKING

import anyio

from simulator.hinted import tell
from simulator.history import Record
from troupellm.actors.client.stream import Stream
from troupellm.actors.engine.submit import submit
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.input import Submission

if TYPE_CHECKING:
    from simulator.fronts import SimFront
    from simulator.world import World

_STALL_SECONDS = (0.2, 2.0, 8.0, 1000.0)
"""A stall ends at the latest when the calm comes."""


class Client:
    def __init__(self, world: "World", record: Record) -> None:
        self._world = world
        self.record = record
        self.ask = record.ask
        self._name = f"client-{record.ask.number}"
        self._front: SimFront | None = None
        self._leaving = anyio.CancelScope()

    @property
    def request(self) -> int | None:
        """The engine's number of it, once the scheduler was told of it."""
        return self._world.numbers.get(self._name)

    def leave(self) -> None:
        """Go away in the midst of it."""
        self._leaving.cancel()

    async def run(self) -> None:
        """Ask, once."""
        world, record, ask = self._world, self.record, self.ask
        await anyio.sleep(ask.start)
        tell(world, ask, before=True)
        leaving = world.injector.strike("client", "disconnect")
        patience = float("inf") if leaving is None else world.random.choice((0.0, 0.001, 0.02, 0.1, 0.5))
        stream = Stream(self._name, self._submit, lambda call: call(), params=ask.params)
        try:
            with anyio.move_on_after(patience) as scope, self._leaving:
                await self._read(stream)
            record.left = scope.cancelled_caught or self._leaving.cancelled_caught
        except TroupeError as error:
            record.error = error
        except anyio.get_cancelled_exc_class():
            record.left = True
            raise
        finally:
            record.stream = stream
            record.request = self.request
            record.fell = self._front is not None and self._front.fallen
            record.usage = stream.usage
            tell(world, ask, before=False)
            world.note("client", ask.number, "left" if record.left else repr(record.error))

    async def _submit(self) -> LocalOutbox:
        world, submission = self._world, self._submission()
        if not self.ask.front:
            return await submit(world.system, world.clock, world.scenario.config.stream, submission)
        self._front = await world.fronts.accept()
        return await self._front.remote._submit(submission)

    async def _read(self, stream: Stream) -> None:
        world, record = self._world, self.record
        async with stream:
            if self.ask.params.selects:
                completion = await stream.collect()
                record.start = world.starts.get(self._name, 0)
                world.note("choices", self.ask.number, *completion.choices)
                record.on_completion(completion, world.language, world.scenario)
                return
            async for delta in stream:
                record.start = world.starts.get(self._name, 0)
                world.note("delta", self.ask.number, delta.index, delta.token_ids, delta.text, delta.finish_reason)
                record.on_delta(delta, world.language, stream.prompt_token_ids, world.scenario)
                if record.wrong:
                    world.fail(f"client {self.ask.number}: {record.wrong[0]}")
                await self._dawdle()

    async def _dawdle(self) -> None:
        world = self._world
        if world.injector.strike("client", "stall"):
            self.record.stalled = True
            with anyio.move_on_after(world.random.choice(_STALL_SECONDS)):
                await world.calm.wait()
        slow = world.injector.strike("client", "slow")
        if slow is not None:
            self.record.stalled = True
            await anyio.sleep(slow.seconds)

    def _submission(self) -> Submission:
        ask = self.ask
        return Submission(
            request_id=self._name,
            prompt=ask.prompt,
            params=ask.params,
            wait=ask.wait,
            cache_salt=ask.salt,
            tenant=ask.tenant,
            deadline=ask.deadline,
            streaming=ask.streaming,
            hints=ask.hints,
            adapter=ask.adapter,
        )
