"""An engine that lives in another process, as an API process uses it.

Prompts are rendered, tokenized and checked here; a refusal of any of that costs the engine's process nothing but the
place, which was taken before. Answers come as frames for all requests together and are fanned out by plain calls.
"""

from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, assert_never

import msgspec

from troupellm.actors.admission.prompts import demand_of
from troupellm.actors.client.client_api import ClientApi
from troupellm.actors.client.stream import Stream
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.remote.open_requests import OpenRequests
from troupellm.actors.remote.prompts import Prompts
from troupellm.actors.remote.queries import Queries
from troupellm.actors.runtime.ports import Clock, Randomness, Threads
from troupellm.models.chat_parsers.served_parser import ChatFormat
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import EngineStopped, InvalidRequest, RequestAborted
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.messages.input import Submission, TextPrompt
from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.protocol.params.sampling import Limits
from troupellm.protocol.quota import Quota
from troupellm.protocol.wire.api_process import (
    AdminAnswer,
    Admitted,
    Apply,
    ChargeAnswer,
    Chunks,
    CorrectCharge,
    Ended,
    FromApiProcess,
    MetricsText,
    Serving,
    Status,
    Submit,
)

SILENT_SECONDS = 5.0
"""After so long without a word the engine's process counts as stuck."""

Answer = Admitted | Ended | Chunks | MetricsText | AdminAnswer | ChargeAnswer | Status


class RemoteEngine(ClientApi):
    """Implements `server.served.ServedEngine`. `handle` takes what the engine's process says."""

    def __init__(
        self,
        serving: Serving,
        status: Status,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        chat_format: ChatFormat,
        post: Callable[[FromApiProcess], None],
        on_loop: Callable[[Callable[[], None]], None],
        threads: Threads,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        """
        Args:
            post: queues a message for the engine's process, without waiting.
            on_loop: has a call made on the event loop, from any thread.
        """
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._chat_format = chat_format
        self._serving = serving
        self._status = status
        self._heard = clock.now()
        self._post = post
        self._on_loop = on_loop
        self._clock = clock
        self._randomness = randomness
        self._prompts = Prompts(serving, tokenizer, chat_template, threads, clock)
        self._requests = OpenRequests(serving.config.stream, post, clock)
        self._queries = Queries(post)
        self._lost = False

    # The model and the settings that it serves.

    @property
    def config(self) -> EngineConfig:
        return self._serving.config

    @property
    def ready(self) -> WorkerReady:
        return self._serving.ready

    @property
    def limits(self) -> Limits:
        return self._serving.limits

    @property
    def chat_format(self) -> ChatFormat:
        return self._chat_format

    def _fresh_name(self, nbytes: int) -> str:
        return self._randomness.token(nbytes)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._serving.model_names

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self._serving.defaults

    @property
    def state(self) -> str:
        return "failed" if self._lost else self._status.snapshot.state

    @property
    def silent_seconds(self) -> float:
        """Since the engine's process last said how it is."""
        return self._clock.now() - self._heard

    @property
    def num_open(self) -> int:
        """Requests and queries whose end has not come."""
        return len(self._requests) + len(self._queries)

    def snapshot(self) -> EngineSnapshot:
        """As of the last report, which is a fraction of a second old; ages count on."""
        snapshot = self._status.snapshot
        silent = self.silent_seconds
        age, step = snapshot.last_step_age_seconds, snapshot.step_seconds
        return msgspec.structs.replace(
            snapshot,
            state=self.state,
            last_step_age_seconds=None if age is None else age + silent,
            step_seconds=None if step is None else step + silent,
            uptime_seconds=snapshot.uptime_seconds + silent,
        )

    async def metrics(self, *, compat: bool) -> bytes:
        """
        Raises:
            EngineStopped: no answer in time.
        """
        return await self._queries.metrics(compat=compat)

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        return await self._queries.list_adapters() if self.config.lora.enabled else ()

    async def find_adapter(self, name: str) -> AdapterInfo:
        return await self._queries.find_adapter(name)

    async def administer(self, action: str, arguments: bytes) -> bytes:
        """Run an admin route's action in the engine's process.

        Raises:
            TroupeError: why it was not done.
        """
        return await self._queries.administer(action, arguments)

    async def charge(self, tenant: str, tokens: int) -> Quota | None:
        """See `Engine.charge`; tenants without limits cost the engine's process nothing."""
        if all(tenant != known.name for known in self.config.scheduler.tenants):
            return None
        return await self._queries.charge(tenant, tokens)

    def correct_charge(self, tenant: str, tokens: int, requests: int = 0) -> None:
        if not self._lost:
            self._post(CorrectCharge(tenant=tenant, tokens=tokens, requests=requests))

    # From the engine's process.

    def handle(self, message: Answer) -> None:
        match message:
            case Chunks():
                self._requests.deliver(message)
            case Admitted(request=number, quota=quota):
                self._requests.admit(number, quota)
            case Ended():
                self._requests.end(message)
            case Status():
                self._status = message
                self._heard = self._clock.now()
            case MetricsText() | AdminAnswer() | ChargeAnswer():
                self._queries.answered(message)
            case _:
                assert_never(message)

    def lost(self) -> None:
        """The engine's process is gone: every open request and query ends with an error."""
        self._lost = True
        self._requests.lost()
        self._queries.lost()

    # Requests.

    @property
    def _num_places(self) -> int:
        return self.config.scheduler.max_num_seqs + self.config.scheduler.max_num_queued_reqs

    def _new_request_id(self) -> str:
        return f"req-{self._randomness.token(12)}"

    def _open(self, submission: Submission) -> Stream:
        prompt = submission.prompt
        text = prompt.text if isinstance(prompt, TextPrompt) else None
        start = partial(self._submit, submission)
        return Stream(submission.request_id, start, self._on_loop, prompt=text, params=submission.params)

    async def _submit(self, submission: Submission) -> LocalOutbox:
        """Take a place, prepare the prompt, hand it over.

        Raises:
            EngineOverloaded: no place, and the request does not wait.
            InvalidRequest: it cannot be served.
            EngineStopped: the engine takes no requests.
        """
        if self.state != "ready":
            raise self._refusal()
        request = self._requests.new(streaming=submission.streaming)
        outbox, number = request.outbox, request.outbox.request
        try:
            self._post(
                Apply(
                    request=number,
                    arrival=outbox.arrival,
                    demand=demand_of(submission),
                    wait=submission.wait,
                    deadline=submission.deadline,
                )
            )
            await request.answered.wait()
            if outbox.error is not None:
                raise outbox.error
            prompt = await self._prompts.prepare(submission)
            request.prompt = tuple(prompt.token_ids)
            if self._prompts.stream_interval(submission.params) == 1:
                outbox.keep_apart()
            self._post(
                Submit(
                    request=number,
                    request_id=submission.request_id,
                    prompt=array("i", prompt.token_ids).tobytes(),
                    params=submission.params,
                    streaming=submission.streaming,
                    cache_salt=submission.cache_salt,
                    pooling=submission.pooling,
                    truncated=prompt.truncated,
                    segment=prompt.segment,
                    leases=prompt.leases,
                    hints=submission.hints,
                    adapter=submission.adapter,
                    generated=submission.generated,
                )
            )
        except BaseException as error:
            request.invalid = isinstance(error, InvalidRequest)
            if not outbox.terminal:
                outbox.abort()  # which tells the engine's process
                outbox.fail(RequestAborted("the request was refused, or its caller left"))
            raise
        return outbox

    def _refusal(self) -> EngineStopped:
        if self.state == "failed":
            return EngineStopped("the engine has failed", code="engine_failed")
        return EngineStopped(f"the engine is {self.state}", code=self.state)
