"""The adapter library: names are looked up once, loads are checked, and every caller gets an answer."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.adapters.actor import AdapterLibrary, AdapterSources, Inspected
from troupellm.actors.adapters.registry import MISSING_SECONDS, AdapterRegistry
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.errors import (
    AdapterError,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    RequestAborted,
    RequestFailed,
    TroupeError,
)
from troupellm.protocol.messages.adapter_library import (
    AddAdapter,
    DropAdapter,
    FindAdapter,
    RemoveAdapter,
    ServeAdapter,
)
from troupellm.protocol.messages.adapters import AdapterInfo, AdapterPreparation, AdapterRef
from troupellm.protocol.messages.input import PrepareRequest, Submission, TokensPrompt
from troupellm.protocol.messages.scheduler import AbortRequest, AdapterLoaded, WantAdapter
from troupellm.protocol.params.sampling import SamplingParams

pytestmark = pytest.mark.anyio
PREPARED = AdapterPreparation(outcome="prepared", num_bytes=1)


class HandClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


class Inline:
    """Threads that are none."""

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await checkpoint()
        return function(*args)


class Refusals:
    """The outbox of a request that is refused."""

    def __init__(self) -> None:
        self.error: TroupeError | None = None

    def fail(self, error: TroupeError) -> None:
        self.error = error

    def wake(self) -> None: ...


class Finder:
    """A resolver that waits until it may answer."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.asked: list[str] = []
        self.free = anyio.Event()
        self.free.set()

    async def resolve(self, name: str) -> Path | None:
        self.asked.append(name)
        await self.free.wait()
        if name == "broken":
            raise OSError("the network is gone")
        return Path("/found", name) if name in self.names else None


class Desk:
    """The library with its neighbours."""

    def __init__(self, *, searches: int = 4) -> None:
        self.inbox: Mailbox[Any, Any] = Mailbox("adapters", 64)
        self.intake: Mailbox[Any, Any] = Mailbox("intake", 64)
        self.scheduler: Mailbox[Any, Any] = Mailbox("scheduler", 64)
        self.clock = HandClock()
        self.finder = Finder("sql", "legal")
        self.registry = AdapterRegistry(["base"])
        self.prepared: list[str] = []
        self.released: list[str] = []
        self.outcome = PREPARED
        self.ready = anyio.Event()
        self.ready.set()
        self.epoch = 0
        self.heard: list[AdapterLoaded] = []
        self.contents: dict[str, str] = {}
        self.numbers = itertools.count(1)
        sources = AdapterSources(
            registry=self.registry,
            resolvers=[self.finder],
            inspect=self.inspect,
            parent="base",
            most_searches=searches,
        )
        self.library = AdapterLibrary(
            self.inbox,
            self.intake,
            self.scheduler,
            sources,
            prepare=self.prepare,
            release=self.released.append,
            engine_epoch=lambda: self.epoch,
            threads=Inline(),
            clock=self.clock,
        )

    def inspect(self, folder: str) -> Inspected:
        if "broken" in folder or self.contents.get(folder) == "":
            raise OSError("the disk is gone")
        if "torn" in folder:
            raise AdapterError("adapter_config.json is missing")
        return Inspected(digest=self.contents.get(folder, f"digest of {folder}"), rank=4, num_bytes=100)

    async def prepare(self, digest: str, folder: str) -> AdapterPreparation:
        self.prepared.append(digest)
        await self.ready.wait()
        return self.outcome

    async def ask(self, name: str) -> PrepareRequest:
        number = next(self.numbers)
        submission = Submission(
            request_id=f"r{number}", prompt=TokensPrompt([1]), params=SamplingParams(), adapter=name
        )
        message = PrepareRequest(request=number, submission=submission, outbox=Refusals(), arrival=0.0)
        await self.inbox.put(message)
        return message

    async def call(self, make: Callable[..., Any], **fields: Any) -> list[AdapterInfo | TroupeError]:
        answers: list[AdapterInfo | TroupeError] = []
        await self.inbox.put(make(done=answers.append, **fields))
        return answers

    async def add(self, name: str, folder: str = "/a", *, replace: bool = False) -> list[AdapterInfo | TroupeError]:
        return await self.call(AddAdapter, name=name, folder=folder, parent="base", replace=replace)

    def passed_on(self) -> list[tuple[int, AdapterRef | None]]:
        found = []
        while (message := self.intake.take()) is not None:
            found.append((message.request, message.adapter))
        return found

    def told(self) -> list[AdapterLoaded]:
        """The messages that the scheduler has had since the last call."""
        self._hear()
        found, self.heard = self.heard, []
        return found

    async def schedule(self) -> None:
        """The scheduler has room for every adapter."""
        while await self.scheduler.wait():
            self._hear()

    def _hear(self) -> None:
        while (message := self.scheduler.take()) is not None:
            if isinstance(message, WantAdapter):
                self.inbox.control(ServeAdapter(message.digest, message.folder))
            else:
                self.heard.append(message)


@asynccontextmanager
async def running(desk: Desk) -> AsyncIterator[Desk]:
    async with anyio.create_task_group() as group:
        await group.start(desk.library.run)
        group.start_soon(desk.schedule)
        yield desk
        desk.inbox.close()
        group.cancel_scope.cancel()


settled = anyio.wait_all_tasks_blocked


def error_of(message: PrepareRequest) -> TroupeError | None:
    assert isinstance(message.outbox, Refusals)
    return message.outbox.error


async def test_a_loaded_adapter_is_read_by_the_worker_and_named_by_requests() -> None:
    async with running(Desk()) as desk:
        answers = await desk.add("sql", "/a")
        await desk.ask("sql")
        await settled()
        (info,) = answers
        assert isinstance(info, AdapterInfo)
        assert (info.name, info.digest, info.folder, info.parent, info.rank) == ("sql", "digest of /a", "/a", "base", 4)
        assert desk.prepared == ["digest of /a"]
        assert desk.told() == [AdapterLoaded("digest of /a", 0, PREPARED)]
        await desk.ask("sql")
        await settled()
        assert desk.passed_on()[-1] == (2, AdapterRef("sql", "digest of /a", "/a"))


async def test_an_unknown_name_is_looked_for_once_by_all_who_ask() -> None:
    async with running(Desk()) as desk:
        desk.finder.free = anyio.Event()
        asked = [await desk.ask("sql") for _ in range(5)]
        found = await desk.call(FindAdapter, name="sql")
        await settled()
        assert desk.library.busy
        desk.finder.free.set()
        await settled()
        assert desk.finder.asked == ["sql"]
        assert sorted(number for number, _ in desk.passed_on()) == [message.request for message in asked]
        assert [info.name for info in found] == ["sql"]
        assert not desk.library.busy
        assert desk.prepared == []


async def test_a_name_that_no_resolver_knows_is_not_looked_for_again_for_a_while() -> None:
    async with running(Desk()) as desk:
        first = await desk.ask("nothing")
        await settled()
        second = await desk.ask("nothing")
        await settled()
        for message in (first, second):
            error = error_of(message)
            assert isinstance(error, ModelNotFound)
            assert "served here: base" in error.message
        assert desk.finder.asked == ["nothing"]
        desk.clock.seconds += MISSING_SECONDS
        await desk.ask("nothing")
        await settled()
        assert desk.finder.asked == ["nothing", "nothing"]


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "a//b", "", "x\0y", "ä", "a" * 129, "base"])
async def test_a_name_that_no_adapter_can_have_reaches_no_resolver(name: str) -> None:
    async with running(Desk()) as desk:
        message = await desk.ask(name)
        answers = await desk.add(name)
        await settled()
        assert isinstance(error_of(message), ModelNotFound)
        assert desk.finder.asked == []
        assert isinstance(answers[0], InvalidRequest)
        assert len(str(answers[0])) < 300


async def test_a_flood_of_unknown_names_is_bounded() -> None:
    async with running(Desk(searches=4)) as desk:
        desk.finder.free = anyio.Event()
        asked = [await desk.ask(f"n{number}") for number in range(20)]
        await settled()
        refused = [message for message in asked if error_of(message) is not None]
        assert len(desk.finder.asked) == 4
        assert len(refused) == 16
        assert all(isinstance(error_of(message), EngineOverloaded) for message in refused)
        desk.finder.free.set()
        await settled()
        assert all(error_of(message) is not None for message in asked)


async def test_a_resolver_that_breaks_costs_its_name_alone() -> None:
    async with running(Desk()) as desk:
        broken = await desk.ask("broken")
        await desk.ask("sql")
        await settled()
        assert isinstance(error_of(broken), RequestFailed)
        assert [number for number, _ in desk.passed_on()] == [2]


async def test_an_aborted_request_is_answered_while_its_name_is_looked_for() -> None:
    async with running(Desk()) as desk:
        desk.finder.free = anyio.Event()
        message, other = await desk.ask("sql"), await desk.ask("sql")
        await settled()
        desk.inbox.control(AbortRequest(message.request))
        await settled()
        assert isinstance(error_of(message), RequestAborted)
        desk.finder.free.set()
        await settled()
        assert [number for number, _ in desk.passed_on()] == [other.request]


async def test_a_name_is_taken_once_and_given_again_in_place() -> None:
    async with running(Desk()) as desk:
        await desk.add("sql", "/a")
        again, elsewhere = await desk.add("sql", "/b"), await desk.add("law", "/a")
        await settled()
        assert isinstance(again[0], InvalidRequest)
        assert "has already been loaded" in again[0].message
        assert isinstance(elsewhere[0], AdapterInfo)
        replaced = await desk.add("sql", "/b", replace=True)
        await settled()
        assert [info.digest for info in replaced] == ["digest of /b"]
        assert [info.folder for info in desk.registry.infos] == ["/a", "/b"]


async def test_two_loads_of_one_name_at_once_give_one_adapter() -> None:
    async with running(Desk()) as desk:
        desk.ready = anyio.Event()
        first, second = await desk.add("sql"), await desk.add("sql")
        third = await desk.add("sql", "/b", replace=True)
        await settled()
        assert first == second == third == []
        assert desk.prepared == ["digest of /a"]
        desk.ready.set()
        await settled()
        assert isinstance(first[0], AdapterInfo)
        assert isinstance(second[0], InvalidRequest)
        assert [info.digest for info in third] == ["digest of /b"]
        assert desk.prepared == ["digest of /a", "digest of /b"]


@pytest.mark.parametrize(
    ("outcome", "kind"), [("refused", AdapterError), ("late", EngineStopped), ("gone", AdapterInfo)]
)
async def test_what_the_worker_says_decides_a_load(outcome: Any, kind: type) -> None:
    async with running(Desk()) as desk:
        desk.outcome = AdapterPreparation(outcome=outcome, error="tensor x has shape [3]")
        answers = await desk.add("sql")
        await settled()
        assert isinstance(answers[0], kind)
        assert len(desk.registry) == (kind is AdapterInfo)


async def test_a_folder_over_which_reading_breaks_costs_its_callers_alone() -> None:
    async with running(Desk()) as desk:
        answers, (message, other) = await desk.add("mine", "/broken"), [await desk.ask(name) for name in ("sql", "law")]
        desk.finder.names.add("law")
        desk.contents["/found/law"] = ""
        await settled()
        assert isinstance(answers[0], RequestFailed)
        assert error_of(message) is None
        assert isinstance(error_of(other), RequestFailed)


async def test_a_folder_that_cannot_be_read_is_refused_before_the_worker_hears_of_it() -> None:
    async with running(Desk()) as desk:
        answers = await desk.add("sql", "/torn")
        await settled()
        assert isinstance(answers[0], AdapterError)
        assert desk.prepared == []


async def test_an_adapter_is_unloaded_once() -> None:
    async with running(Desk()) as desk:
        await desk.add("mine")
        await settled()
        first, second = await desk.call(RemoveAdapter, name="mine"), await desk.call(RemoveAdapter, name="mine")
        message = await desk.ask("mine")
        await settled()
        assert isinstance(first[0], AdapterInfo)
        assert isinstance(second[0], ModelNotFound)
        assert isinstance(error_of(message), ModelNotFound)


async def test_the_scheduler_is_answered_with_the_epoch_of_its_question() -> None:
    async with running(Desk()) as desk:
        desk.ready = anyio.Event()
        desk.inbox.control(ServeAdapter("d", "/a"))
        await settled()
        desk.epoch = 1
        desk.ready.set()
        await settled()
        assert desk.told() == [AdapterLoaded("d", 0, PREPARED)]


async def test_an_adapter_that_is_dropped_is_freed_by_the_worker() -> None:
    async with running(Desk()) as desk:
        desk.inbox.control(DropAdapter("d"))
        await settled()
        assert desk.released == ["d"]


async def test_all_who_wait_are_answered_when_the_library_ends() -> None:
    desk = Desk()
    async with running(desk):
        desk.finder.free = anyio.Event()
        desk.ready = anyio.Event()
        message, found = await desk.ask("sql"), await desk.call(FindAdapter, name="sql")
        added = await desk.add("mine")
        desk.inbox.control(ServeAdapter("d", "/a"))
        await settled()
    assert isinstance(error_of(message), EngineStopped)
    assert isinstance(found[0], EngineStopped)
    assert isinstance(added[0], EngineStopped)
    told = {answer.digest: answer.preparation.outcome for answer in desk.told()}
    assert told == {"d": "late", "digest of /a": "late"}
