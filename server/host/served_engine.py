"""The part of an engine that the routes use; the engine lives in this process or behind a socket."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from troupellm.actors.admission.prompts import PromptLike
from troupellm.actors.client.pooling import Scored
from troupellm.actors.client.stream import Stream
from troupellm.models.chat_parsers.served_parser import ChatFormat, ChatParser
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.kv_hints import NO_HINTS, KVHints
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.messages.input import ChatPrompt, RequestGroup, Truncation
from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.protocol.params.outputs import Completion, Pooled
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import Limits, SamplingParams
from troupellm.protocol.params.tools import NO_TOOLS, ToolUse
from troupellm.protocol.quota import Quota


class ServedEngine(Protocol):
    """See `Engine`, whose methods these are."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def state(self) -> str:
        """starting, ready, draining, failed, stopped."""

    @property
    def ready(self) -> WorkerReady: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_format(self) -> ChatFormat: ...

    @property
    def model_names(self) -> tuple[str, ...]: ...

    @property
    def defaults(self) -> Mapping[str, Any]: ...

    def snapshot(self) -> EngineSnapshot:
        """Published state; never waits for anybody."""

    def sampling(self, **overrides: Any) -> SamplingParams: ...

    def chat_parser(
        self, prompt: ChatPrompt, use: ToolUse = NO_TOOLS, *, show_reasoning: bool = True
    ) -> ChatParser | None: ...

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        wait: bool = True,
        request_id: str | None = None,
        tenant: str = "",
        request_group: RequestGroup | None = None,
        cache_salt: bytes = b"",
        deadline: float | None = None,
        streaming: bool = True,
        hints: KVHints = NO_HINTS,
        adapter: str = "",
    ) -> Stream: ...

    async def generate(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Completion: ...

    async def pool_all(
        self, prompts: Sequence[PromptLike], params: PoolingParams | None = None, **options: Any
    ) -> list[Pooled]: ...

    async def score_pairs(
        self,
        first: Sequence[PromptLike],
        second: Sequence[PromptLike],
        params: PoolingParams | None = None,
        *,
        truncation: Truncation | None = None,
        **options: Any,
    ) -> list[Scored]: ...

    async def charge(self, tenant: str, tokens: int) -> Quota | None: ...

    def correct_charge(self, tenant: str, tokens: int, requests: int = 0) -> None: ...

    async def list_adapters(self) -> tuple[AdapterInfo, ...]: ...

    async def find_adapter(self, name: str) -> AdapterInfo: ...

    async def metrics(self, *, compat: bool) -> bytes: ...
