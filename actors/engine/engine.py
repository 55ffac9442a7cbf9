"""The engine: one model behind actors, inside the caller's own event loop and task tree.

    async with Engine("folder or hub id") as engine:
        completion = await engine.generate("Hello", max_tokens=64)
        async with engine.stream("Tell me a story", max_tokens=512) as stream:
            async for delta in stream:
                print(delta.text, end="")

Several engines may live in one process, and leaving the block gives everything back, torch's number of threads and the
garbage collector's frozen objects (`models/processes/preload_torch.py`) among it. The loop must be asyncio's (uvloop
too); requests and commands come from that loop, properties are read anywhere.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from troupellm.actors.client.client_api import ClientApi
from troupellm.actors.client.stream import Stream
from troupellm.actors.engine.adapters import EngineAdapters
from troupellm.actors.engine.admin import EngineAdmin
from troupellm.actors.engine.api_process_session import Answer, ApiProcessSession
from troupellm.actors.engine.submit import charge, submit
from troupellm.actors.input.actor import is_short
from troupellm.actors.input.tokenize import tokenize
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.models.chat_parsers.served_parser import ChatFormat
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.messages.input import Prompt, Submission, TextPrompt
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.protocol.params.sampling import Limits
from troupellm.protocol.quota import Quota
from troupellm.protocol.wire.api_process import Serving


class Engine(EngineAdmin, EngineAdapters, ClientApi):
    """See the module. Settings are the fields of `EngineConfig`, flat; they override `config`.

    Raises:
        ConfigError: an unknown setting or a wrong value.
        ModelLoadError: on entering, when the model cannot be served.
        WrongEventLoop: on entering, when no event loop of asyncio runs; later, when a call comes from another event
            loop, thread or process.
    """

    # The model and the settings that it serves.

    @property
    def ready(self) -> WorkerReady:
        return self._require().loaded.ready

    @property
    def limits(self) -> Limits:
        return self._require().limits

    @property
    def tokenizer(self) -> Tokenizer:
        return self._require().loaded.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._require().loaded.chat_template

    def count_template_processes(self) -> int:
        """Processes that render chat templates, idle ones among them; 0 while the engine is not open."""
        return 0 if self._running is None else self._running.machinery.num_template_processes

    @property
    def chat_format(self) -> ChatFormat:
        """How its answers are read: tool calls and reasoning."""
        return self._require().loaded.chat_format

    def _fresh_name(self, nbytes: int) -> str:
        return self._randomness.token(nbytes)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._require().loaded.names

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the model itself asks for."""
        return self._require().loaded.defaults

    async def render(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt becomes, off the event loop where it is long."""
        running = self._on_loop()
        loaded, pool = running.loaded, running.machinery.pool
        work = partial(tokenize, prompt, loaded.tokenizer, loaded.chat_template.patient, None)
        tokens = work() if is_short(prompt) else await pool.run(work)
        return list(tokens.token_ids)

    async def charge(self, tenant: str, tokens: int) -> Quota | None:
        """Take a request that generates nothing from a tenant's limits per minute; what is left of them.

        Args:
            tokens: of its text, as far as is known; see `correct_charge`.

        Raises:
            RateLimited: the tenant has reached a limit; nothing was taken.
        """
        return charge(self._on_loop().system, tenant, tokens)

    def correct_charge(self, tenant: str, tokens: int, requests: int = 0) -> None:
        """A charge was wrong by so many tokens and requests."""
        if self._running is not None:
            self._running.system.admission.quotas.change(tenant, tokens=tokens, requests=requests)

    # Metrics and state.

    def metrics_text(self, *, compat: bool = True) -> bytes:
        """Prometheus' text format; `compat` repeats what vLLM has too under its names."""
        return self._require().exposition.text(compat=compat)

    async def metrics(self, *, compat: bool = True) -> bytes:
        """The same; awaited where the engine may live in another process."""
        return self.metrics_text(compat=compat)

    # Fronts in processes of their own.

    def serving(self) -> Serving:
        """The settings with which an API process prepares requests for this engine."""
        loaded = self._require().loaded
        return Serving(
            config=msgspec.structs.replace(
                self.config, model=msgspec.structs.replace(self.config.model, hf_token=None)
            ),
            model_names=loaded.names,
            tokenizer_folder=str(loaded.tokenizer_folder),
            defaults=loaded.defaults,
            limits=self.limits,
            ready=loaded.ready,
        )

    def api_process_session(
        self,
        post: Callable[[Answer], None],
        drained: Callable[[], Awaitable[None]],
        part_seconds: float | None = None,
    ) -> ApiProcessSession:
        """The engine's side of one API process; see there."""
        system, config = self._require().system, self.config.stream
        return ApiProcessSession(system, self._clock, config, post=post, drained=drained, part_seconds=part_seconds)

    @property
    def _num_places(self) -> int:
        return self.config.scheduler.max_num_seqs + self.config.scheduler.max_num_queued_reqs

    def _new_request_id(self) -> str:
        return f"req-{self._randomness.token(12)}"

    def _open(self, submission: Submission) -> Stream:
        running, prompt = self._require(), submission.prompt
        return Stream(
            submission.request_id,
            partial(self._submit, submission),
            running.machinery.loop.post,
            prompt=prompt.text if isinstance(prompt, TextPrompt) else None,
            params=submission.params,
        )

    async def _submit(self, submission: Submission) -> LocalOutbox:
        running = self._on_loop()
        if self.state != "ready":
            raise self._refusal()
        return await submit(running.system, self._clock, self.config.stream, submission)
