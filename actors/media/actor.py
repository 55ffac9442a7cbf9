"""Media actor: turns the images of a request into what the model's encoder reads, before the prompt is rendered.

Owns:      the prepared images that are kept, and the requests whose images are fetched or prepared.
Receives:  PrepareRequest whose prompt has images; on the control lane AbortRequest.
Sends:     PrepareRequest with prepared images to the input processor, or to the adapter library where the request
           names an adapter; a refusal to the request's outbox.
On crash:  restarted with an empty cache; each request that waited is answered.
"""

import hmac
from hashlib import sha256
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.guide.fair_queue import TooManyWaiting, Turns
from troupellm.actors.kv_cache.block_hash import namespace
from troupellm.actors.media.fetch import Fetcher
from troupellm.actors.media.item_cache import ItemCache
from troupellm.actors.media.preparer import ImageFault, MediaPreparer
from troupellm.actors.runtime.mailbox import Mailbox, MailboxClosed
from troupellm.actors.runtime.ports import Clock, Threads
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.errors import (
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    QueueTimeout,
    RateLimited,
    RequestAborted,
    RequestFailed,
    TroupeError,
)
from troupellm.protocol.messages.input import ChatPrompt, PrepareRequest, Submission
from troupellm.protocol.messages.media import MediaItem, MediaSource
from troupellm.protocol.messages.scheduler import AbortRequest
from troupellm.protocol.messages.snapshot import MediaSnapshot

BAD_IMAGE: Final = "invalid_image"
PARALLEL_FETCHES: Final = 16
INLINE_BYTES: Final = 2**18
"""Files up to this size are hashed on the event loop: under a millisecond."""


class Media:
    """The asynchronous shell. Requests are prepared beside each other; those of one tenant take turns with others."""

    def __init__(
        self,
        inbox: Mailbox[PrepareRequest, AbortRequest],
        intake: Mailbox[PrepareRequest, Any],
        adapters: Mailbox[Any, Any] | None,
        preparer: MediaPreparer,
        fetcher: Fetcher,
        config: MediaConfig,
        *,
        most_vectors: int,
        secret: bytes,
        threads: Threads,
        clock: Clock,
    ) -> None:
        """
        Args:
            adapters: the adapter library's; None where no adapter is served.
            most_vectors: embeddings of one image that the worker can keep.
            secret: keys the digests of images, which name their embeddings in the prefix cache.
        """
        self._inbox, self._intake, self._adapters = inbox, intake, adapters
        self._preparer, self._fetcher, self._config = preparer, fetcher, config
        self._most_vectors = most_vectors
        self._secret = hmac.digest(secret, b"media", "sha256")
        self._threads, self._clock = threads, clock
        self._preparing = Turns(preparer.parallel, clock)
        self._fetching = Turns(PARALLEL_FETCHES, clock)
        self._scopes: dict[int, anyio.CancelScope] = {}
        """Of the requests under way."""
        self.items = ItemCache(config.mm_processor_cache_bytes)
        self.prepared = self.refused = self.unavailable = 0
        """Images."""

    @property
    def busy(self) -> bool:
        """Whether a request waits for its images."""
        return bool(self._scopes)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until the inbox is closed and empty and everything in it was passed on."""
        task_status.started()
        async with anyio.create_task_group() as group:
            group.start_soon(self._preparer.warm_up)
            while await self._inbox.wait():
                while (said := self._inbox.take()) is not None:
                    if isinstance(said, AbortRequest):
                        if (scope := self._scopes.get(said.request)) is not None:
                            scope.cancel()
                    else:  # at most as many as admission lets in
                        group.start_soon(self._pass_on, said)

    async def _pass_on(self, message: PrepareRequest) -> None:
        """Prepare a request's images and send it on, or answer it. The choke point for what images raise."""
        left = None if message.deadline is None else message.deadline - self._clock.now()
        error: TroupeError = RequestAborted("the request was aborted")
        try:
            with anyio.CancelScope() as scope:
                self._scopes[message.request] = scope
                with anyio.move_on_after(left):
                    await self._send(await self._prepared(message))
                    return
                error = QueueTimeout("the deadline passed before the images were prepared")
        except TroupeError as refusal:
            error = refusal
        except MailboxClosed:
            error = EngineStopped("the engine was closed")
        except anyio.get_cancelled_exc_class():
            _refuse(message, EngineStopped("the media actor ended", code="engine_restarting"))
            raise
        except Exception as cause:  # breaks this request only
            error = RequestFailed("the images could not be prepared")
            error.__cause__ = cause
        finally:
            self._scopes.pop(message.request, None)
        _refuse(message, error)

    async def _send(self, message: PrepareRequest) -> None:
        if message.submission.adapter and self._adapters is not None:
            await self._adapters.put(message)
        else:
            await self._intake.put(message)

    async def _prepared(self, message: PrepareRequest) -> PrepareRequest:
        submission, prompt = message.submission, message.submission.prompt
        assert isinstance(prompt, ChatPrompt)
        most = self._config.most_images
        if len(prompt.media) > most:
            field = prompt.media[most].field
            raise InvalidRequest(f"{field}: a prompt may have at most {most} images", param=field)
        items = tuple([await self._item(source, submission) for source in prompt.media])
        prompt = msgspec.structs.replace(prompt, media=(), items=items)
        return msgspec.structs.replace(message, submission=msgspec.structs.replace(submission, prompt=prompt))

    async def _item(self, source: MediaSource, submission: Submission) -> MediaItem:
        if not source.url:
            return await self._item_of(source.data, source, submission)
        ticket = self._ticket(self._fetching, submission.tenant, len(source.url), source.field)
        async with self._fetching.turn(ticket):  # until it is prepared: no more files than turns wait in memory
            try:
                data = await self._fetcher.fetch(source.url, source.field)
            except InvalidRequest:
                self.unavailable += 1
                raise
            return await self._item_of(data, source, submission)

    async def _item_of(self, data: bytes, source: MediaSource, submission: Submission) -> MediaItem:
        if len(data) > self._config.max_media_bytes:
            self.refused += 1
            text = f"{source.field}: an image may have at most {self._config.max_media_bytes} bytes, got {len(data)}"
            raise InvalidRequest(text, param=source.field, code=BAD_IMAGE)
        owner = namespace(tenant=submission.tenant, cache_salt=submission.cache_salt)
        file = await self._named(owner, data)
        known = self.items.find(file)
        if known is not None:
            return known
        ticket = self._ticket(self._preparing, submission.tenant, len(data), source.field)
        async with self._preparing.turn(ticket):
            known = self.items.find(file)  # another request may have had it prepared meanwhile
            return known or await self._new_item(source.field, owner, file, data)

    async def _new_item(self, field: str, owner: bytes, file: bytes, data: bytes) -> MediaItem:
        if self.items.alive_bytes >= self._config.media_memory_bytes:
            self.items.shrink(0)
            if self.items.alive_bytes >= self._config.media_memory_bytes:
                raise EngineOverloaded("the prepared images of other requests take all memory; try again later")
        try:
            made = await self._preparer.prepare(data)
        except ImageFault as fault:
            self.refused += 1
            raise InvalidRequest(f"{field}: {fault}", param=field, code=BAD_IMAGE) from None
        if made.num_vectors > self._most_vectors:
            text = f"{field}: the image takes {made.num_vectors} embeddings, encoder_cache_bytes holds"
            raise InvalidRequest(f"{text} {self._most_vectors}", param=field, code=BAD_IMAGE)
        self.prepared += 1
        item = MediaItem(
            digest=hmac.digest(self._secret, owner + made.digest, "sha256"),
            num_vectors=made.num_vectors,
            grid=made.grid,
            tensors=made.tensors,
        )
        return self.items.add(file, item)

    async def _named(self, owner: bytes, data: bytes) -> bytes:
        """A name for a file within its tenant."""
        digest = _sha256(data) if len(data) <= INLINE_BYTES else await self._threads.run(_sha256, data)
        return hmac.digest(self._secret, b"file" + owner + digest, "sha256")

    @staticmethod
    def _ticket(turns: Turns, tenant: str, size: int, field: str) -> Any:
        try:
            return turns.queue(tenant, size)
        except TooManyWaiting:
            raise RateLimited(f"{field}: too many images of this key wait; try again later") from None

    def snapshot(self) -> MediaSnapshot:
        return MediaSnapshot(
            prepared=self.prepared,
            refused=self.refused,
            unavailable=self.unavailable,
            hits=self.items.hits,
            processes_killed=self._preparer.num_killed,
            held_bytes=self.items.alive_bytes,
            kept_bytes=self.items.kept_bytes,
            waiting=len(self._scopes),
        )


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def _refuse(message: PrepareRequest, error: TroupeError) -> None:
    message.outbox.fail(error)
    message.outbox.wake()
