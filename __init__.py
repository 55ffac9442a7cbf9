"""Troupe: an LLM inference and serving engine built as actors.

The public door. Names resolve on first use (PEP 562), so importing a subpackage pulls in nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troupellm.actors.embeds import EmbedsPrompt as EmbedsPrompt
    from troupellm.actors.engine import Engine as Engine
    from troupellm.actors.metric_reader import (
        Counter as Counter,
        Gauge as Gauge,
        Histogram as Histogram,
        Vector as Vector,
    )
    from troupellm.actors.offline import (
        LLM as LLM,
        CompletionOutput as CompletionOutput,
        RequestOutput as RequestOutput,
    )
    from troupellm.actors.pooling_outputs import (
        ClassificationOutput as ClassificationOutput,
        ClassificationRequestOutput as ClassificationRequestOutput,
        EmbeddingOutput as EmbeddingOutput,
        EmbeddingRequestOutput as EmbeddingRequestOutput,
        PoolingOutput as PoolingOutput,
        PoolingRequestOutput as PoolingRequestOutput,
        ScoringOutput as ScoringOutput,
        ScoringRequestOutput as ScoringRequestOutput,
    )
    from troupellm.actors.scheduler.offload.policy import EvictionPolicy as EvictionPolicy, TierFull as TierFull
    from troupellm.models.connectors.connector import ConnectorContext as ConnectorContext
    from troupellm.models.dialects.syntax import (
        CallSyntax as CallSyntax,
        Channels as Channels,
        Thinking as Thinking,
        Written as Written,
    )
    from troupellm.models.guides.backend import Matcher as Matcher
    from troupellm.models.logits_processors import LogitsProcessor as LogitsProcessor, ProcessedRow as ProcessedRow
    from troupellm.models.offload.store import (
        BlockStore as BlockStore,
        StoreContext as StoreContext,
        StoreCorrupt as StoreCorrupt,
        StoreError as StoreError,
        StoreMiss as StoreMiss,
        StoreUse as StoreUse,
    )
    from troupellm.models.speculation.drafts import Drafts as Drafts
    from troupellm.models.speculation.proposer import (
        Observation as Observation,
        ProposalBatch as ProposalBatch,
        Proposer as Proposer,
        RowDraws as RowDraws,
    )
    from troupellm.models.speculation.registry import ProposerContext as ProposerContext
    from troupellm.models.speculation.taps import Taps as Taps
    from troupellm.protocol.beam_search import (
        BeamSearchOutput as BeamSearchOutput,
        BeamSearchParams as BeamSearchParams,
        BeamSearchSequence as BeamSearchSequence,
    )
    from troupellm.protocol.config import EngineConfig as EngineConfig, ServerConfig as ServerConfig
    from troupellm.protocol.errors import (
        ConfigError as ConfigError,
        Conflict as Conflict,
        ContextLengthExceeded as ContextLengthExceeded,
        EngineOverloaded as EngineOverloaded,
        EngineStopped as EngineStopped,
        GraphCaptureError as GraphCaptureError,
        InvalidRequest as InvalidRequest,
        KVLoadFailed as KVLoadFailed,
        ModelLoadError as ModelLoadError,
        ModelNotFound as ModelNotFound,
        QueueTimeout as QueueTimeout,
        RateLimited as RateLimited,
        RequestAborted as RequestAborted,
        RequestFailed as RequestFailed,
        TroupeError as TroupeError,
        WorkerCrashed as WorkerCrashed,
        WrongEventLoop as WrongEventLoop,
    )
    from troupellm.protocol.guide import GuideSpec as GuideSpec
    from troupellm.protocol.intake import (
        ChatPrompt as ChatPrompt,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
    )
    from troupellm.protocol.output_kind import RequestOutputKind as RequestOutputKind
    from troupellm.protocol.outputs import (
        Completion as Completion,
        CompletionChoice as CompletionChoice,
        Delta as Delta,
        Message as Message,
        ToolCall as ToolCall,
    )
    from troupellm.protocol.pooling import PoolingParams as PoolingParams
    from troupellm.protocol.proposer_report import ProposerReport as ProposerReport
    from troupellm.protocol.sampling import SamplingParams as SamplingParams
    from troupellm.protocol.snapshot import EngineSnapshot as EngineSnapshot
    from troupellm.protocol.speculative import SpeculativeConfig as SpeculativeConfig
    from troupellm.protocol.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from troupellm.protocol.vllm_names import (
        ModelRegistry as ModelRegistry,
        initialize_ray_cluster as initialize_ray_cluster,
    )
    from troupellm.protocol.worker import NewRow as NewRow
    from troupellm.server.app import asgi as asgi
    from troupellm.server.lifespan import lifespan as lifespan
    from troupellm.server.vllm_api.argument_parser import FlexibleArgumentParser as FlexibleArgumentParser
    from troupellm.server.vllm_api.async_engine import AsyncLLM as AsyncLLM, AsyncLLMEngine as AsyncLLMEngine
    from troupellm.server.vllm_api.engine_args import AsyncEngineArgs as AsyncEngineArgs, EngineArgs as EngineArgs
    from troupellm.server.vllm_api.llm_engine import LLMEngine as LLMEngine
    from troupellm.server.vllm_api.print_utils import print_embeddings as print_embeddings

_HOMES = {
    "Engine": "actors.engine",
    "LLM": "actors.offline",
    "RequestOutput": "actors.offline",
    "CompletionOutput": "actors.offline",
    "EngineConfig": "protocol.config",
    "ServerConfig": "protocol.config",
    "TextPrompt": "protocol.intake",
    "TokensPrompt": "protocol.intake",
    "ChatPrompt": "protocol.intake",
    "EngineSnapshot": "protocol.snapshot",
    "SamplingParams": "protocol.sampling",
    "GuideSpec": "protocol.guide",
    "StructuredOutputsParams": "protocol.structured_outputs",
    "PoolingParams": "protocol.pooling",
    "BeamSearchParams": "protocol.beam_search",
    "BeamSearchOutput": "protocol.beam_search",
    "BeamSearchSequence": "protocol.beam_search",
    "Completion": "protocol.outputs",
    "CompletionChoice": "protocol.outputs",
    "Delta": "protocol.outputs",
    "Message": "protocol.outputs",
    "ToolCall": "protocol.outputs",
    "TroupeError": "protocol.errors",
    "InvalidRequest": "protocol.errors",
    "ContextLengthExceeded": "protocol.errors",
    "EngineOverloaded": "protocol.errors",
    "EngineStopped": "protocol.errors",
    "RequestFailed": "protocol.errors",
    "ModelLoadError": "protocol.errors",
    "WorkerCrashed": "protocol.errors",
    "GraphCaptureError": "protocol.errors",
    "RequestAborted": "protocol.errors",
    "ConfigError": "protocol.errors",
    "ModelNotFound": "protocol.errors",
    "Conflict": "protocol.errors",
    "KVLoadFailed": "protocol.errors",
    "QueueTimeout": "protocol.errors",
    "RateLimited": "protocol.errors",
    "WrongEventLoop": "protocol.errors",
    "asgi": "server.app",
    "lifespan": "server.lifespan",
    **dict.fromkeys(
        (
            *("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"),
            *("ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
        ),
        "actors.pooling_outputs",
    ),
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Vector"), "actors.metric_reader"),
    "EmbedsPrompt": "actors.embeds",
    "RequestOutputKind": "protocol.output_kind",
    "ModelRegistry": "protocol.vllm_names",
    "initialize_ray_cluster": "protocol.vllm_names",
    "FlexibleArgumentParser": "server.vllm_api.argument_parser",
    "AsyncLLM": "server.vllm_api.async_engine",
    "AsyncLLMEngine": "server.vllm_api.async_engine",
    "AsyncEngineArgs": "server.vllm_api.engine_args",
    "EngineArgs": "server.vllm_api.engine_args",
    "LLMEngine": "server.vllm_api.llm_engine",
    "print_embeddings": "server.vllm_api.print_utils",
    **dict.fromkeys(
        ("BlockStore", "StoreContext", "StoreCorrupt", "StoreError", "StoreMiss", "StoreUse"), "models.offload.store"
    ),
    "ConnectorContext": "models.connectors.connector",
    **dict.fromkeys(("CallSyntax", "Channels", "Thinking", "Written"), "models.dialects.syntax"),
    "Matcher": "models.guides.backend",
    **dict.fromkeys(("LogitsProcessor", "ProcessedRow"), "models.logits_processors"),
    "Drafts": "models.speculation.drafts",
    **dict.fromkeys(("Observation", "ProposalBatch", "Proposer", "RowDraws"), "models.speculation.proposer"),
    "Taps": "models.speculation.taps",
    "ProposerContext": "models.speculation.registry",
    **dict.fromkeys(("EvictionPolicy", "TierFull"), "actors.scheduler.offload.policy"),
    "SpeculativeConfig": "protocol.speculative",
    "NewRow": "protocol.worker",
    "ProposerReport": "protocol.proposer_report",
}

__all__ = [*sorted(_HOMES), "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Engine":  # importing it takes a third of a second, which a running event loop should not wait for
        return import_module(f"{__name__}.actors.late_engine").engine_class()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
