"""`LLM`: the engine for scripts and notebooks, with vLLM's names. Runs in a thread with an event loop of its own."""

import os
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, TypeVarTuple, Unpack

import msgspec

from troupellm.actors.admission.prompts import PromptLike, as_prompt, as_salt
from troupellm.actors.engine.engine import Engine
from troupellm.actors.engine.engine_thread import EngineThread
from troupellm.actors.llm.lora_request import LoRARequest
from troupellm.actors.llm.outputs import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    beam_output,
    request_output,
    with_messages,
)
from troupellm.actors.llm.pooling import AnswerT, OfflinePooling
from troupellm.actors.llm.progress_bar import Bar
from troupellm.actors.llm.script_tokenizer import ScriptTokenizer
from troupellm.actors.metrics.metric_reader import Metric, read_metrics
from troupellm.protocol.errors import EngineStopped, InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt, EmbedsPrompt, TextPrompt, TokensPrompt
from troupellm.protocol.messages.sleep import PauseMode, ProfileReport, SleepReport, WakeTag
from troupellm.protocol.params.beam_search import BeamSearchOutput, BeamSearchParams
from troupellm.protocol.params.sampling import SamplingParams, beam_sampling
from troupellm.protocol.params.tools import tool_use
from troupellm.protocol.vllm.names import refuse_name

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

CONCURRENCY = 1024
"""Requests handed to the engine at once; it schedules them as it can."""

Message = Mapping[str, Any]
_Work = Iterable[tuple[PromptLike, SamplingParams | None]]


class LLM(OfflinePooling):
    """Blocking, and usable where an event loop already runs. Use it as a context manager, or call `close`; dropping
    the last reference and the end of the program close it too.

    Raises:
        ConfigError: an unknown setting or a wrong value.
        ModelLoadError: the model cannot be served.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        self.engine = Engine(model, **settings)
        self._home = EngineThread(self.engine)
        self._finalizer = weakref.finalize(self, self._home.watch.fire)
        self._finalizer.atexit = False  # too late: threads are joined before

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, `{"prompt": text}`, `{"prompt_token_ids": ids}`, `{"prompt_embeds": array}`, each
        with a `cache_salt` if wanted; one or many.

        Args:
            lora_request: the adapter of all prompts, or one for each; it is loaded if it is not served yet.
            priority: one number for each prompt, instead of that of its parameters.

        Raises:
            TroupeError: the first request that failed, or an adapter that cannot be served.
        """
        adapters = self._adapters(lora_request, len(_as_list(prompts)))
        if priority is not None:
            each = _each(sampling_params, len(_as_list(prompts)))
            sampling_params = self._with_priorities(each, priority)
        return self._run([_prompt(prompt) for prompt in _as_list(prompts)], sampling_params, use_tqdm, adapters)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Message] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them.

        The outputs have the text as the model wrote it, and a `message` in which reasoning and tool calls stand apart.
        """
        self._require()
        use = tool_use(tools, tool_choice)
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = [
            ChatPrompt(
                messages=conversation,
                tools=use.tools or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
                template=chat_template,
            )
            for conversation in conversations
        ]
        chat_parsers = [self.engine.chat_parser(prompt, use) for prompt in prompts]
        each = _each(sampling_params, len(prompts))
        params = [
            given if chat_parser is None else chat_parser.applied(given or self.get_default_sampling_params())
            for given, chat_parser in zip(each, chat_parsers, strict=True)
        ]
        outputs = self._run(prompts, params, use_tqdm, self._adapters(lora_request, len(prompts)))
        return [with_messages(output, chat_parser) for output, chat_parser in zip(outputs, chat_parsers, strict=True)]

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest answers to each prompt, best first.

        Raises:
            TroupeError: the first request that failed.
        """
        sampling = beam_sampling(params, self.engine.limits)
        adapters = self._adapters(lora_request, len(_as_list(prompts)))
        outputs = self._run([_prompt(prompt) for prompt in _as_list(prompts)], sampling, use_tqdm, adapters)
        return [beam_output(output, self.engine.tokenizer) for output in outputs]

    def get_tokenizer(self) -> ScriptTokenizer:
        """The model's tokenizer and chat template with the names of transformers."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.engine.sampling()

    def get_metrics(self) -> list[Metric]:
        """The metrics of the engine as they are now, under vLLM's names."""
        return read_metrics(self._call(self.engine.metrics).decode())

    def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of all prompts and answers so far; False where a store of KV offload could not."""
        return self._call(self.engine.reset_prefix_cache)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport:
        """Give memory back until `wake_up`: at level 1 the KV cache, at level 2 the weights too; what that brought."""
        return self._call(self.engine.sleep, level, mode)

    def wake_up(self, tags: Sequence[WakeTag] | None = None) -> SleepReport:
        """Take it back; only the parts that `tags` name (weights, kv_cache, scheduling), if given."""
        return self._call(self.engine.wake, tags)

    def start_profile(self, folder: str = "troupellm_profile") -> None:
        """Record with torch's profiler what the next steps do, up to a hundred of them.

        Args:
            folder: of the trace, made if it is missing.
        """
        return self._call(self.engine.start_profile, folder)

    def stop_profile(self) -> ProfileReport:
        """Write what was recorded; where."""
        return self._call(self.engine.stop_profile)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """The same from vLLM's `EngineArgs`.

        Raises:
            ConfigError: a wrong or unsupported value.
            ModelLoadError: the model cannot be served.
        """
        return cls(config=engine_args.create_engine_config())

    def collective_rpc(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: a worker runs no code of its caller."""
        refuse_name("collective_rpc")

    def apply_model(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: a worker runs no code of its caller."""
        refuse_name("apply_model")

    def close(self) -> None:
        """Free the model and end the thread. Idempotent."""
        self._finalizer.detach()
        self._home.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _tokenizer(self) -> ScriptTokenizer:
        return ScriptTokenizer.of(self.engine)

    def _with_priorities(
        self, params: Sequence[SamplingParams | None], priority: Sequence[int]
    ) -> list[SamplingParams]:
        if len(priority) != len(params):
            raise InvalidRequest(
                f"{len(params)} prompts need as many priorities, got {len(priority)}", param="priority"
            )
        default = self.get_default_sampling_params()
        pairs = zip(params, priority, strict=True)
        return [msgspec.structs.replace(given or default, priority=each) for given, each in pairs]

    def _require(self) -> None:
        """
        Raises:
            EngineStopped: this was closed.
            WrongEventLoop: this process is a fork of the one with the engine, and has none of its threads.
        """
        if not self._finalizer.alive:
            raise EngineStopped("the LLM was closed", code="stopped")
        self._home.check()

    def _call(self, function: Callable[[Unpack[ArgsT]], Awaitable[T]], *args: *ArgsT) -> T:
        self._require()
        return self._home.portal.call(function, *args)

    def _run(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams | None] | None,
        use_tqdm: bool,
        adapters: Sequence[str],
    ) -> list[RequestOutput]:
        self._require()
        each = _each(params, len(prompts))
        work = list(zip(prompts, each, strict=True))
        if use_tqdm:
            with Bar(total=len(prompts), desc="Processed prompts", dynamic_ncols=True) as bar:
                outputs = self._wait_for(self._collect, work, adapters, bar.update)
        else:
            outputs = self._wait_for(self._collect, work, adapters, lambda: None)
        return [outputs[index] for index in range(len(prompts))]

    def _wait_for(self, work: Callable[..., Awaitable[AnswerT]], *args: Any) -> AnswerT:
        self._require()
        future = self._home.portal.start_task_soon(work, *args)
        try:
            return future.result()
        except BaseException:  # an interrupt, too, ends the work
            future.cancel()
            raise

    async def _collect(
        self, work: _Work, adapters: Sequence[str], on_done: Callable[[], object]
    ) -> dict[int, RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        async for index, completion in self.engine.map_each(work, adapters=adapters, concurrency=CONCURRENCY):
            outputs[index] = request_output(completion)
            on_done()
        return outputs


def _as_list(prompts: Any) -> Sequence[Any]:
    """One prompt stands for a list of one; a list of integers is one prompt."""
    single = isinstance(prompts, str | Mapping | TextPrompt | TokensPrompt | ChatPrompt | EmbedsPrompt)
    if single or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _prompt(prompt: Any) -> PromptLike:
    """The prompt, checked; a mapping stays one where it has a cache salt."""
    made = as_prompt(prompt)
    return prompt if isinstance(prompt, Mapping) and as_salt("", prompt) else made


def _each(params: SamplingParams | Sequence[SamplingParams | None] | None, count: int) -> list[SamplingParams | None]:
    """Parameters for each of so many prompts.

    Raises:
        InvalidRequest: there are more or less of them.
    """
    each = [params] * count if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts need as many sampling_params, got {len(each)}", param="sampling_params")
    return each
