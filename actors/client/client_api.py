"""The request API of an engine, whether it runs in this process or in another one."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import repeat
from typing import Any

import msgspec

from troupellm.actors.admission.prompts import PromptLike, as_prompt, as_salt
from troupellm.actors.client.images import taken_images
from troupellm.actors.client.mapping import map_streams
from troupellm.actors.client.pooling import PoolingApi
from troupellm.actors.client.stream import Stream
from troupellm.models.chat_parsers.served_parser import ChatFormat, ChatParser
from troupellm.protocol.config.kv_hints import NO_HINTS, KVHints
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt, Generated, RequestGroup, Submission
from troupellm.protocol.params.beam_search import beam_defaults
from troupellm.protocol.params.outputs import Completion
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.tools import NO_TOOLS, ToolUse, tool_use


class ClientApi(PoolingApi):
    """All ways to send a request. A subclass says where the requests go."""

    @property
    @abstractmethod
    def defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the model itself asks for."""

    @property
    @abstractmethod
    def chat_format(self) -> ChatFormat:
        """How the model writes tool calls and reasoning."""

    @abstractmethod
    def _fresh_name(self, nbytes: int) -> str:
        """Twice so many hexadecimal digits."""

    def chat_parser(
        self, prompt: ChatPrompt, use: ToolUse = NO_TOOLS, *, show_reasoning: bool = True
    ) -> ChatParser | None:
        """How the answers to a prompt are to be read; None where they are plain text.

        Raises:
            InvalidRequest: tools must be called, and it is not known how this model writes calls.
        """
        return self.chat_format.chat_parser(prompt, use, token=self._fresh_name, show_reasoning=show_reasoning)

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The model's own defaults with `overrides`; None leaves a default as it is, but `max_tokens=None` is a value.

        Raises:
            InvalidRequest: a value is out of range.
        """
        given = {name: value for name, value in overrides.items() if value is not None or name == "max_tokens"}
        defaults = beam_defaults(self.defaults) if given.get("use_beam_search") else self.defaults
        return SamplingParams(**{**defaults, **given})

    def stream(
        self,
        prompt: PromptLike | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_embeds: Any = None,
        wait: bool = True,
        request_id: str | None = None,
        tenant: str = "",
        request_group: RequestGroup | None = None,
        cache_salt: str | bytes = b"",
        deadline: float | None = None,
        streaming: bool = True,
        hints: KVHints = NO_HINTS,
        adapter: str = "",
        generated: tuple[Generated, ...] = (),
        **sampling: Any,
    ) -> Stream:
        """A request that starts when its block is entered, or at its first delta.

        Args:
            params: replaces the model's defaults; `sampling` overrides single fields of either.
            prompt_embeds: input embeddings instead of a prompt, an array of floats [tokens, hidden]; its tokens show
                as zeros in the answer.
            wait: wait for a place instead of raising EngineOverloaded.
            tenant: whose request it is: tenants get fair shares and share no prefix-cache entries.
            request_group: those whose prompts belong to one call; see `request_group_of`.
            cache_salt: replaces the tenant in the prefix cache: requests with the same salt share cache entries with
                each other, across tenants, and with no other request.
            deadline: seconds within which the request must have been scheduled.
            streaming: False when only the whole answer matters: one wake at the end.
            hints: about the KV cache; they change no answer.
            adapter: name of a LoRA adapter; empty is the model itself.
            generated: what another engine of the same model has drawn of each sequence; the answer is the rest. With
                the same seed it has the tokens that the other engine would have drawn.
        """
        if params is None:
            params = self.sampling(**sampling)
        elif sampling:
            params = msgspec.structs.replace(params, **sampling)
        else:
            params = copy(params)  # its owner may change it for the next request
        if streaming and params.selects is not None:
            raise InvalidRequest(
                f"{params.selects} cannot be streamed: nothing is known before the end; use streaming=False",
                param=params.selects,
            )
        self.check_replica(hints)
        submission = Submission(
            request_id=request_id or self._new_request_id(),
            prompt=as_prompt(prompt, prompt_embeds),
            params=params,
            wait=wait,
            tenant=tenant,
            request_group=request_group,
            cache_salt=as_salt(cache_salt, prompt),
            deadline=deadline,
            streaming=streaming,
            hints=hints,
            adapter=adapter,
            generated=generated,
        )
        return self._open(submission)

    async def generate(
        self, prompt: PromptLike | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The whole answer. `options` are those of `stream`."""
        async with self.stream(prompt, params, **{"streaming": False, **options}) as stream:
            return await stream.collect()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> Stream:
        """A request whose prompt the model's chat template writes. `options` are those of `stream`.

        Its deltas have the text as the model wrote it. `Stream.turn` iterates over content, reasoning and tool calls
        instead, and the choices that `Stream.collect` gives have each a `message`.

        Args:
            messages: a part of a content may be `{"type": "image", "image": ...}`, with the bytes of a file, its path
                or an image of Pillow.
            tools: in OpenAI's form.
            tool_choice: none, auto (the default), required, or `{"type": "function", "function": {"name": ...}}`.
        """
        use = tool_use(tools, tool_choice, parallel_tool_calls)
        messages, media = taken_images(messages)
        prompt = ChatPrompt(
            messages=messages,
            media=media,
            tools=use.tools or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=self.chat_format.with_effort(template_kwargs, reasoning_effort),
            documents=documents,
            template=chat_template,
        )
        chat_parser = self.chat_parser(prompt, use)
        own = {name: options.pop(name) for name in list(options) if name in SamplingParams.__struct_fields__}
        params = self.sampling(**own) if params is None else msgspec.structs.replace(params, **own)
        stream = self.stream(prompt, params if chat_parser is None else chat_parser.applied(params), **options)
        stream.is_chat, stream.chat_parser = True, chat_parser
        return stream

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
        self,
        work: Iterable[tuple[PromptLike, SamplingParams | None]],
        *,
        adapters: Sequence[str] | None = None,
        concurrency: int = 64,
        **options: Any,
    ) -> AsyncIterator[tuple[int, Completion]]:
        """The same for prompts that bring parameters of their own.

        Args:
            adapters: names of LoRA adapters, one for each prompt.
        """
        options["streaming"] = False  # no reader takes pieces before the end, so a budget would pause it for ever
        named = ({"adapter": name} for name in adapters) if adapters is not None else repeat({})
        makers = (
            partial(self.stream, prompt, params, **(options | adapter))
            for (prompt, params), adapter in zip(work, named, strict=False)
        )
        return map_streams(makers, lambda: concurrency, Stream.collect)
