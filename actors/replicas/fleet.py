"""A fleet: engine processes of one model behind the interface of one engine.

    async with Fleet(config, server, spawn) as fleet:
        async with fleet.stream("Tell me a story", max_tokens=200) as stream: ...

Requests are admitted, rendered and tokenized here, so that the caps and the limits of keys hold for all replicas
together; `Router` brings them to replicas. An answer outlives the replica that computes it.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

import anyio
import msgspec

from troupellm.actors.admission.admission import Admission, AdmissionSlot
from troupellm.actors.admission.prompts import demand_of
from troupellm.actors.client.client_api import ClientApi
from troupellm.actors.client.stream import Stream
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.remote.prompts import Prompts, read_tokenizer
from troupellm.actors.replicas.admin import FleetAdmin
from troupellm.actors.replicas.replica import Replica, Spawn, with_rank
from troupellm.actors.replicas.request import with_seed
from troupellm.actors.replicas.router import Router
from troupellm.actors.runtime.ports import LoopPort, SystemClock, SystemRandomness
from troupellm.actors.runtime.thread_pool import ThreadPool
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.models.chat_parsers.served_parser import ChatFormat
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import TemplateProcesses
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.errors import (
    ConfigError,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    QueueTimeout,
    RateLimited,
    RequestAborted,
)
from troupellm.protocol.messages.input import Submission, TextPrompt
from troupellm.protocol.messages.worker import ProgressSink, WorkerReady
from troupellm.protocol.params.sampling import Limits
from troupellm.protocol.quota import Quota
from troupellm.protocol.wire.api_process import Admitted, Chunks, Ended, Loading, Serving
from troupellm.protocol.wire.replica import FromReplica, StartReplica

_POOL_SIZE = 4
"""Two of them for long texts at most: see `long_texts`."""


class Fleet(FleetAdmin, ClientApi):
    """Implements `server.host.served_engine.ServedEngine`, and what a server needs of an engine beside it."""

    def __init__(
        self, config: EngineConfig, server: ServerConfig, spawn: Spawn, progress: ProgressSink | None = None
    ) -> None:
        """
        Args:
            config: of each replica; caps and limits are those of one engine, and hold as often as there are replicas.
            server: the settings that admin actions need; without keys.
            spawn: starts an engine process.
        """
        self._clock, self._randomness = SystemClock(), SystemRandomness()
        self._progress = progress
        self.num_replicas = self._size = config.parallel.data_parallel_size
        self.config = _for_all(config)
        unlimited = tuple(
            msgspec.structs.replace(tenant, requests_per_minute=None, tokens_per_minute=None, max_concurrency=None)
            for tenant in config.scheduler.tenants
        )
        scheduler = msgspec.structs.replace(config.scheduler, tenants=unlimited)
        start = StartReplica(config=msgspec.structs.replace(config, scheduler=scheduler), server=server)
        self.replicas = [
            Replica(self, number, with_rank(start, number), spawn, self._clock) for number in range(self._size)
        ]
        secret = bytes.fromhex(self._randomness.token(32))
        self._router = Router(config.parallel, config.stream, self.replicas, self._clock, secret)
        self._router.stopped = self._refusal_if_over
        self._admission = Admission(self.config.scheduler, self._clock)
        self._pool = ThreadPool("troupellm-fleet", _POOL_SIZE)
        self._templates = TemplateProcesses()
        self._post_to_loop: Any = None
        self._serving: Serving | None = None
        self._texts: tuple[Tokenizer, ChatFormat, Prompts] | None = None
        self._stack: AsyncExitStack | None = None
        self._rejected: Counter[str] = Counter()
        self._restarting = anyio.Lock()
        self._draining = self._stopped = False
        self._changes: list[Waiter] = []

    # Life.

    async def __aenter__(self) -> Self:
        """Returns once every replica serves.

        Raises:
            ModelLoadError: and other errors of a replica that cannot load the model.
        """
        self._post_to_loop = LoopPort().post
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._let_go)
            group = anyio.create_task_group()
            await group.__aenter__()
            # The group never hears of the block's exception, which it would wrap or take for its own cancellation.
            stack.push_async_callback(group.__aexit__, None, None, None)
            stack.callback(group.cancel_scope.cancel)
            self._router.group = group
            for replica in self.replicas:
                group.start_soon(replica.run)
            await self._until(lambda: all(each.state == "ready" for each in self.replicas) or self._first_failure())
            if (failure := self._first_failure()) is not None:
                raise failure
            await self._open_texts()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            self._draining = True
            self._router.end_all(lambda: EngineStopped("the engine was closed"))
            for replica in self.replicas:
                replica.stop()
            await stack.__aexit__(None, None, None)

    async def _let_go(self) -> None:
        self._stopped = True
        with anyio.CancelScope(shield=True):
            self._templates.close()
            await self._pool.close(1.0)

    async def _open_texts(self) -> None:
        serving = self.replicas[0].serving
        assert serving is not None
        kinds = {each.serving.ready.device for each in self.replicas if each.serving is not None}
        if len(kinds) > 1:
            found = " and ".join(sorted(kinds))
            text = f"data_parallel_size {self._size}: replicas run on {found}; at most one for each GPU can be served"
            raise ConfigError(text, param="data_parallel_size")
        self._serving = serving
        tokenizer, chat_format = await self._pool.run(read_tokenizer, serving, self._templates)
        prompts = Prompts(serving, tokenizer, chat_format.template, self._pool, self._clock)
        self._texts = tokenizer, chat_format, prompts

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let the open ones finish for `timeout` seconds, fail the rest with EngineStopped."""
        self._draining = True
        self._admission.close()
        if not await self._router.wait_empty(timeout):
            self._router.end_all(lambda: EngineStopped("the engine is shutting down"))

    async def wait_failed(self) -> Exception | None:
        """Wait until no replica can be kept alive; gives the cause, or None when the fleet was closed."""
        await self._until(lambda: self._stopped or self.failure is not None)
        return self.failure

    @property
    def failure(self) -> Exception | None:
        """The root cause, once every replica was given up."""
        failures = [each.failure for each in self.replicas if each.state == "failed"]
        return failures[0] if len(failures) == self._size else None

    @property
    def state(self) -> str:
        """starting, ready, draining, failed, stopped. Ready while a replica is."""
        if self.failure is not None:
            return "failed"
        if self._stopped:
            return "stopped"
        if self._draining:
            return "draining"
        loaded = self._texts is not None and any(each.state == "ready" for each in self.replicas)
        return "ready" if loaded else "starting"

    async def restart(self) -> None:
        """Replace the replicas one after the other; their requests move to the others, and lose nothing.

        A second call waits for the first one, and replaces them again.

        Raises:
            EngineStopped: a replica did not come back; those after it were left as they are.
        """
        async with self._restarting:
            for replica in self.replicas:
                await self._restart(replica)

    async def _restart(self, replica: Replica) -> None:
        if replica.failed:
            return
        before = replica.restarts if replica.linked else -1  # without a process, the next one is new
        replica.stop()
        self._router.empty(replica)
        await self._until(lambda: replica.failed or (replica.state == "ready" and replica.restarts > before))
        if replica.failed:
            text = f"replica {replica.number} did not come back: {replica.failure}; those after it were not restarted"
            raise EngineStopped(text, code="engine_failed")

    # From the replicas.

    def on_message(self, replica: Replica, message: FromReplica) -> None:
        match message:
            case Admitted() | Ended() | Chunks():
                self._router.on_message(replica, message)
            case Loading(progress=progress):
                if replica.number == 0 and self._texts is None and self._progress is not None:
                    self._progress(progress)
            case _:
                raise AssertionError(f"a replica does not say {message}")

    def on_change(self) -> None:
        self._router.on_change()
        changes, self._changes = self._changes, []
        for waiter in changes:
            waiter.wake()

    def on_lost(self, replica: Replica) -> None:
        self._router.on_lost(replica)
        self.on_change()

    # The model and the settings that it serves.

    @property
    def ready(self) -> WorkerReady:
        return self._require().ready

    @property
    def limits(self) -> Limits:
        return self._require().limits

    @property
    def tokenizer(self) -> Tokenizer:
        return self._require_texts()[0]

    @property
    def chat_template(self) -> ChatTemplate:
        return self._require_texts()[1].template

    @property
    def chat_format(self) -> ChatFormat:
        return self._require_texts()[1]

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._require().model_names

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self._require().defaults

    def count_template_processes(self) -> int:
        """Processes that render chat templates, idle ones among them."""
        return len(self._templates.pids)

    def _fresh_name(self, nbytes: int) -> str:
        return self._randomness.token(nbytes)

    async def charge(self, tenant: str, tokens: int) -> Quota | None:
        """See `Engine.charge`."""
        quotas = self._admission.quotas
        quotas.check(tenant, requests=1, sequences=0, tokens=tokens)
        return quotas.take(tenant, requests=1, sequences=0, tokens=tokens)

    def correct_charge(self, tenant: str, tokens: int, requests: int = 0) -> None:
        self._admission.quotas.change(tenant, tokens=tokens, requests=requests)

    # Requests.

    @property
    def _num_places(self) -> int:
        return self._admission.capacity

    def _new_request_id(self) -> str:
        return f"req-{self._randomness.token(12)}"

    def _open(self, submission: Submission) -> Stream:
        prompt = submission.prompt
        text = prompt.text if isinstance(prompt, TextPrompt) else None
        start = partial(self._submit, submission)
        return Stream(submission.request_id, start, self._post_to_loop, prompt=text, params=submission.params)

    async def _submit(self, submission: Submission) -> LocalOutbox:
        """Take a place in the fleet, prepare the prompt, bring it to a replica.

        Raises:
            EngineOverloaded: no place, and the request does not wait.
            InvalidRequest: it cannot be served.
            EngineStopped: the fleet takes no requests.
        """
        if self.state != "ready":
            raise self._refusal()
        if submission.generated:
            raise InvalidRequest("generated is for one engine, and not for a fleet", param="generated")
        slot = await self._enter(submission)
        request = self._router.open(with_seed(submission, self._randomness.seed() >> 1), slot)
        outbox = request.outbox
        try:
            _, _, prompts = self._require_texts()
            request.prepared(await prompts.prepare(request.submission))
            if prompts.stream_interval(submission.params) == 1:
                outbox.keep_apart()
            if self.config.cache.enable_prefix_caching:
                self._router.name_blocks(request, self.ready.block_size)
            await self._router.place(request)
        except BaseException as error:
            self._rejected["invalid"] += isinstance(error, InvalidRequest)
            if not outbox.terminal:
                outbox.abort()
                outbox.fail(RequestAborted("the request was refused, or its caller left"))
            raise
        return outbox

    async def _enter(self, submission: Submission) -> AdmissionSlot:
        demand = demand_of(submission)
        try:
            if not submission.wait:
                return self._admission.enter(demand)
            waits = [each for each in (submission.deadline, self.config.scheduler.queue_timeout) if each is not None]
            with anyio.move_on_after(min(waits, default=None)):
                return await self._admission.wait(demand)
        except EngineOverloaded as error:
            self._rejected["rate_limit" if isinstance(error, RateLimited) else "overloaded"] += 1
            raise
        self._rejected["deadline"] += 1
        raise QueueTimeout("the deadline passed before there was a place")

    def _refusal(self) -> EngineStopped:
        if self.state == "failed":
            return EngineStopped("the engine has failed", code="engine_failed")
        if self._texts is not None and self.state == "starting":
            return EngineStopped(f"no replica is ready: {'; '.join(self.missing())}", code="engine_restarting")
        return EngineStopped(f"the engine is {self.state}", code=self.state)

    def _refusal_if_over(self) -> EngineStopped | None:
        return self._refusal() if self.failure is not None or self._draining or self._stopped else None

    def _require(self) -> Serving:
        if self._serving is None:
            raise self._refusal()
        return self._serving

    def _require_texts(self) -> tuple[Tokenizer, ChatFormat, Prompts]:
        if self._texts is None:
            raise self._refusal()
        return self._texts

    def _first_failure(self) -> Exception | None:
        return next((each.failure for each in self.replicas if each.failure is not None), None)

    async def _until(self, holds: Any) -> None:
        while not holds():
            waiter = new_waiter()
            self._changes.append(waiter)
            await waiter.wait()


def _for_all(config: EngineConfig) -> EngineConfig:
    """The settings of the whole fleet."""
    scheduler, size = config.scheduler, config.parallel.data_parallel_size
    whole = msgspec.structs.replace(
        scheduler,
        max_num_seqs=size * scheduler.max_num_seqs,
        max_num_queued_reqs=size * scheduler.max_num_queued_reqs,
        max_num_queued_tokens=(
            None if scheduler.max_num_queued_tokens is None else size * scheduler.max_num_queued_tokens
        ),
    )
    model = msgspec.structs.replace(config.model, hf_token=None)
    return msgspec.structs.replace(config, scheduler=whole, model=model)
