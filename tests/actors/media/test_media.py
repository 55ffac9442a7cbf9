"""The media actor over a fetcher and a preparer that only exist in the test."""

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from troupellm.actors.media.actor import PARALLEL_FETCHES, Media
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import SystemClock
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.errors import InvalidRequest, RequestAborted
from troupellm.protocol.messages.input import ChatPrompt, PrepareRequest, Submission
from troupellm.protocol.messages.media import MediaSource, MediaTensor
from troupellm.protocol.messages.scheduler import AbortRequest
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.wire.media import ImagePrepared

pytestmark = pytest.mark.anyio
TENSORS = (MediaTensor("pixel_values", "uint8", (1,), b"\0"),)


class Outbox:
    def __init__(self) -> None:
        self.error: Any = None

    def fail(self, error: Any, spent: Any = None) -> None:
        self.error = error

    def wake(self) -> None:
        pass


class Stage:
    """Fetches and prepares: counts the files in hand, and lets none of them go before `gate` is set."""

    parallel, num_killed = 2, 0

    def __init__(self) -> None:
        self.fetch_gate, self.gate = anyio.Event(), anyio.Event()
        self.fetched = self.fetching = self.cancelled = 0

    async def fetch(self, url: str, field: str) -> bytes:
        self.fetching += 1
        try:
            await self.fetch_gate.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        self.fetched += 1
        return url.encode()

    async def prepare(self, data: bytes) -> ImagePrepared:
        await self.gate.wait()
        return ImagePrepared(digest=data, num_vectors=4, grid=(1, 1), tensors=TENSORS)

    async def warm_up(self) -> None:
        pass


class Bench:
    def __init__(self, **settings: Any) -> None:
        self.stage = Stage()
        self.inbox: Mailbox[Any, Any] = Mailbox("media", 64)
        self.intake: Mailbox[Any, Any] = Mailbox("intake", 64)
        self.outboxes: dict[int, Outbox] = {}
        self.media = Media(
            self.inbox,
            self.intake,
            None,
            self.stage,
            self.stage,
            MediaConfig(**settings),
            most_vectors=8,
            secret=b"s",
            threads=SimpleNamespace(),
            clock=SystemClock(),
        )

    async def ask(self, request: int, *sources: MediaSource, tenant: str = "a") -> None:
        prompt = ChatPrompt(messages=[], media=sources)
        params = SamplingParams()
        outbox = self.outboxes[request] = Outbox()
        submission = Submission(request_id=f"r{request}", prompt=prompt, params=params, tenant=tenant)
        await self.inbox.put(PrepareRequest(request=request, submission=submission, outbox=outbox, arrival=0.0))

    async def run(self, *, then: Any) -> None:
        with anyio.fail_after(5.0):
            async with anyio.create_task_group() as group:
                group.start_soon(self.media.run)
                await then()
                self.inbox.close()

    def taken(self) -> list[PrepareRequest]:
        return list(iter(self.intake.take, None))


def url(number: int) -> MediaSource:
    return MediaSource(url=f"https://host.example/{number}.png", field="messages[0].content[0]")


async def test_no_more_files_wait_for_their_preparation_than_are_fetched_at_once():
    bench = Bench()

    async def then() -> None:
        bench.stage.fetch_gate.set()
        for request in range(PARALLEL_FETCHES + 8):
            await bench.ask(request, url(request), tenant=str(request))
        await anyio.wait_all_tasks_blocked()
        assert bench.stage.fetched == PARALLEL_FETCHES
        bench.stage.gate.set()

    await bench.run(then=then)
    assert len(bench.taken()) == PARALLEL_FETCHES + 8


async def test_a_client_that_leaves_ends_its_fetch_alone():
    bench = Bench()

    async def then() -> None:
        for request in (1, 2):
            await bench.ask(request, url(request))
        await anyio.wait_all_tasks_blocked()
        bench.inbox.control(AbortRequest(1))
        await anyio.wait_all_tasks_blocked()
        assert (bench.stage.cancelled, type(bench.outboxes[1].error)) == (1, RequestAborted)
        bench.stage.fetch_gate.set()
        bench.stage.gate.set()

    await bench.run(then=then)
    assert [message.request for message in bench.taken()] == [2]
    assert not bench.media.busy


async def test_equal_files_of_two_tenants_have_other_names():
    bench = Bench()

    async def then() -> None:
        bench.stage.gate.set()
        for request, tenant in ((1, "a"), (2, "b"), (3, "a")):
            await bench.ask(request, MediaSource(data=b"file", field="x"), tenant=tenant)
            await anyio.wait_all_tasks_blocked()

    await bench.run(then=then)
    first, other, again = [message.submission.prompt.items[0] for message in bench.taken()]
    assert first.digest != other.digest
    assert again is first


async def test_an_image_of_more_embeddings_than_the_worker_keeps_is_refused_before_it_is_scheduled():
    bench = Bench()
    bench.media._most_vectors = 3

    async def then() -> None:
        bench.stage.gate.set()
        await bench.ask(1, MediaSource(data=b"file", field="x"))

    await bench.run(then=then)
    error = bench.outboxes[1].error
    assert (type(error), error.code, bench.taken()) == (InvalidRequest, "invalid_image", [])


async def test_images_are_counted():
    bench = Bench(max_media_bytes=8)

    async def then() -> None:
        bench.stage.gate.set()
        for request, data in enumerate((b"file", b"file", b"a long file")):
            await bench.ask(request, MediaSource(data=data, field="x"))
            await anyio.wait_all_tasks_blocked()

    await bench.run(then=then)
    seen = bench.media.snapshot()
    assert (seen.prepared, seen.hits, seen.refused, seen.kept_bytes, seen.waiting) == (1, 1, 1, 1, 0)
