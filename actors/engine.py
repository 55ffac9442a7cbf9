"""The engine: one model behind actors, inside the caller's own event loop and task tree.

    async with Engine("folder or hub id") as engine:
        completion = await engine.generate("Hello", max_tokens=64)
        async with engine.stream("Tell me a story", max_tokens=512) as stream:
            async for delta in stream:
                print(delta.text, end="")

Nothing global is touched, several engines may live in one process, and leaving the block gives everything back. The
loop must be asyncio's (uvloop too).
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from troupellm.actors.engine_life import EngineLife
from troupellm.actors.intake import render
from troupellm.actors.mapping import map_streams
from troupellm.actors.outbox import LocalOutbox
from troupellm.actors.stream import Stream
from troupellm.actors.submit import PromptLike, Submission, as_prompt, submit
from troupellm.models.chat_template import ChatTemplate
from troupellm.models.tokenizer import Tokenizer
from troupellm.protocol.intake import ChatPrompt, Prompt, TextPrompt
from troupellm.protocol.outputs import Completion
from troupellm.protocol.sampling import Limits, SamplingParams
from troupellm.protocol.worker import WorkerReady


class Engine(EngineLife):
    """See the module. Settings are the fields of `EngineConfig`, flat; they override `config`.

    Raises:
        ConfigError: an unknown setting or a wrong value.
        ModelLoadError: on entering, when the model cannot be served.
    """

    # What it serves.

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

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._require().loaded.names

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the model itself asks for."""
        return self._require().loaded.defaults

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The model's own defaults with `overrides`; None leaves a default as it is, but `max_tokens=None` is a value.

        Raises:
            InvalidRequest: a value is out of range.
        """
        given = {name: value for name, value in overrides.items() if value is not None or name == "max_tokens"}
        return SamplingParams(**{**self.defaults, **given})

    # Requests.

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        wait: bool = True,
        request_id: str | None = None,
        cache_salt: bytes = b"",
        deadline: float | None = None,
        streaming: bool = True,
        **sampling: Any,
    ) -> Stream:
        """A request that starts when its block is entered, or at its first delta.

        Args:
            params: replaces the model's defaults; `sampling` overrides single fields of either.
            wait: wait for a place instead of raising EngineOverloaded.
            cache_salt: separates what the prefix cache may share.
            deadline: seconds within which the request must have been scheduled.
            streaming: False when only the whole answer matters: one wake at the end.
        """
        if params is None:
            params = self.sampling(**sampling)
        elif sampling:
            params = msgspec.structs.replace(params, **sampling)
        form = as_prompt(prompt)
        submission = Submission(
            request_id=request_id or f"req-{self._randomness.token(12)}",
            prompt=form,
            params=params,
            wait=wait,
            cache_salt=cache_salt,
            deadline=deadline,
            streaming=streaming,
        )
        running = self._require()
        text = form.text if isinstance(form, TextPrompt) else None
        return Stream(
            submission.request_id, partial(self._submit, submission), running.machinery.loop.post, prompt=text
        )

    async def generate(self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer. `options` are those of `stream`."""
        async with self.stream(prompt, params, **{"streaming": False, **options}) as stream:
            return await stream.collect()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> Stream:
        """A request whose prompt the model's chat template writes. `options` are those of `stream`."""
        prompt = ChatPrompt(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return self.stream(prompt, params, **options)

    def map(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None = None,
        *,
        concurrency: int = 64,
        **options: Any,
    ) -> AsyncIterator[tuple[int, Completion]]:
        """(index, completion) of every prompt as each is done, `concurrency` at a time."""
        return self.map_each(((prompt, params) for prompt in prompts), concurrency=concurrency, **options)

    def map_each(
        self, work: Iterable[tuple[PromptLike, SamplingParams | None]], *, concurrency: int = 64, **options: Any
    ) -> AsyncIterator[tuple[int, Completion]]:
        """The same for prompts that bring parameters of their own."""
        options["streaming"] = False  # nobody reads before the end, so a reader's budget would pause it for ever
        makers = (partial(self.stream, prompt, params, **options) for prompt, params in work)
        return map_streams(makers, concurrency)

    async def render(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt becomes, off the event loop where it is long."""
        running = self._require()
        return await render(prompt, running.loaded.tokenizer, running.loaded.chat_template, running.machinery.pool)

    # What is known of it.

    def metrics_text(self, *, compat: bool = True) -> bytes:
        """Prometheus' text format; `compat` repeats what vLLM has too under its names."""
        return self._require().exposition.text(compat=compat)

    async def _submit(self, submission: Submission) -> LocalOutbox:
        if self.state != "ready":
            raise self._refusal()
        return await submit(self._require().system, self._clock, self.config.stream, submission)
