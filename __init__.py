"""Troupe: an LLM inference and serving engine built as actors.

The public door. Names resolve on first use (PEP 562), so importing a subpackage pulls in nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troupellm.actors.adapters.resolvers import LoraResolver as LoraResolver
    from troupellm.actors.admission.embeds_prompt import EmbedsPrompt as EmbedsPrompt
    from troupellm.actors.engine.engine import Engine as Engine
    from troupellm.actors.kv_offload.eviction import EvictionPolicy as EvictionPolicy, TierFull as TierFull
    from troupellm.actors.llm.llm import (
        LLM as LLM,
        CompletionOutput as CompletionOutput,
        RequestOutput as RequestOutput,
    )
    from troupellm.actors.llm.lora_request import LoRARequest as LoRARequest
    from troupellm.actors.llm.pooling_outputs import (
        ClassificationOutput as ClassificationOutput,
        ClassificationRequestOutput as ClassificationRequestOutput,
        EmbeddingOutput as EmbeddingOutput,
        EmbeddingRequestOutput as EmbeddingRequestOutput,
        PoolingOutput as PoolingOutput,
        PoolingRequestOutput as PoolingRequestOutput,
        ScoringOutput as ScoringOutput,
        ScoringRequestOutput as ScoringRequestOutput,
    )
    from troupellm.actors.metrics.metric_reader import (
        Counter as Counter,
        Gauge as Gauge,
        Histogram as Histogram,
        Vector as Vector,
    )
    from troupellm.kernels.quantized_linear import (
        Int8WeightOnly as Int8WeightOnly,
        Outline as Outline,
        QuantizedWeight as QuantizedWeight,
    )
    from troupellm.models.batch.row_drafts import Drafts as Drafts
    from troupellm.models.chat_parsers.syntax import (
        CallSyntax as CallSyntax,
        Channels as Channels,
        OwnCall as OwnCall,
        Thinking as Thinking,
        Written as Written,
    )
    from troupellm.models.config.decoder_config import (
        DecoderConfig as DecoderConfig,
        ExpertNames as ExpertNames,
        LayerNorms as LayerNorms,
        LayerShape as LayerShape,
        MoeConfig as MoeConfig,
        RopeConfig as RopeConfig,
    )
    from troupellm.models.config.hf_config import ConfigReader as ConfigReader, decoder_config as decoder_config
    from troupellm.models.kv_connectors.base import ConnectorContext as ConnectorContext
    from troupellm.models.kv_connectors.signed_block import BlockSignature as BlockSignature
    from troupellm.models.kv_offload.store import (
        BlockStore as BlockStore,
        StoreContext as StoreContext,
        StoreCorrupt as StoreCorrupt,
        StoreError as StoreError,
        StoreMiss as StoreMiss,
        StoreUse as StoreUse,
    )
    from troupellm.models.layers.aux_hidden_states import AuxHiddenStates as AuxHiddenStates
    from troupellm.models.proposers.base import (
        Observation as Observation,
        ProposalBatch as ProposalBatch,
        Proposer as Proposer,
        RowDraws as RowDraws,
    )
    from troupellm.models.proposers.registry import ProposerContext as ProposerContext
    from troupellm.models.quantization.checkpoint import (
        QuantizationFormat as QuantizationFormat,
        QuantizedCheckpoint as QuantizedCheckpoint,
    )
    from troupellm.models.sampling.logits_processors import (
        LogitsProcessor as LogitsProcessor,
        ProcessedRow as ProcessedRow,
    )
    from troupellm.models.structured_outputs.backend import Matcher as Matcher
    from troupellm.protocol.config.engine import EngineConfig as EngineConfig, ServerConfig as ServerConfig
    from troupellm.protocol.config.speculation import SpeculativeConfig as SpeculativeConfig
    from troupellm.protocol.errors import (
        AdapterError as AdapterError,
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
        WeightsChanged as WeightsChanged,
        WorkerCrashed as WorkerCrashed,
        WrongEventLoop as WrongEventLoop,
    )
    from troupellm.protocol.messages.adapters import AdapterInfo as AdapterInfo
    from troupellm.protocol.messages.input import (
        ChatPrompt as ChatPrompt,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
    )
    from troupellm.protocol.messages.proposer_report import ProposerReport as ProposerReport
    from troupellm.protocol.messages.snapshot import EngineSnapshot as EngineSnapshot
    from troupellm.protocol.messages.worker import NewRow as NewRow
    from troupellm.protocol.params.beam_search import (
        BeamSearchOutput as BeamSearchOutput,
        BeamSearchParams as BeamSearchParams,
        BeamSearchSequence as BeamSearchSequence,
    )
    from troupellm.protocol.params.guide import GuideSpec as GuideSpec
    from troupellm.protocol.params.output_kind import RequestOutputKind as RequestOutputKind
    from troupellm.protocol.params.outputs import (
        Completion as Completion,
        CompletionChoice as CompletionChoice,
        Delta as Delta,
        Message as Message,
        ToolCall as ToolCall,
    )
    from troupellm.protocol.params.pooling import PoolingParams as PoolingParams
    from troupellm.protocol.params.sampling import SamplingParams as SamplingParams
    from troupellm.protocol.params.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from troupellm.protocol.vllm.names import (
        ModelRegistry as ModelRegistry,
        initialize_ray_cluster as initialize_ray_cluster,
    )
    from troupellm.server.app.app import asgi as asgi
    from troupellm.server.app.lifespan import lifespan as lifespan
    from troupellm.server.vllm_api.argument_parser import FlexibleArgumentParser as FlexibleArgumentParser
    from troupellm.server.vllm_api.async_engine import AsyncLLM as AsyncLLM, AsyncLLMEngine as AsyncLLMEngine
    from troupellm.server.vllm_api.engine_args import AsyncEngineArgs as AsyncEngineArgs, EngineArgs as EngineArgs
    from troupellm.server.vllm_api.llm_engine import LLMEngine as LLMEngine
    from troupellm.server.vllm_api.print_utils import print_embeddings as print_embeddings

_HOMES = {
    "Engine": "actors.engine.engine",
    "LLM": "actors.llm.llm",
    "RequestOutput": "actors.llm.llm",
    "CompletionOutput": "actors.llm.llm",
    "LoRARequest": "actors.llm.lora_request",
    "LoraResolver": "actors.adapters.resolvers",
    "EngineConfig": "protocol.config.engine",
    "ServerConfig": "protocol.config.engine",
    "TextPrompt": "protocol.messages.input",
    "TokensPrompt": "protocol.messages.input",
    "ChatPrompt": "protocol.messages.input",
    "AdapterInfo": "protocol.messages.adapters",
    "EngineSnapshot": "protocol.messages.snapshot",
    "SamplingParams": "protocol.params.sampling",
    "GuideSpec": "protocol.params.guide",
    "StructuredOutputsParams": "protocol.params.structured_outputs",
    "PoolingParams": "protocol.params.pooling",
    "BeamSearchParams": "protocol.params.beam_search",
    "BeamSearchOutput": "protocol.params.beam_search",
    "BeamSearchSequence": "protocol.params.beam_search",
    "Completion": "protocol.params.outputs",
    "CompletionChoice": "protocol.params.outputs",
    "Delta": "protocol.params.outputs",
    "Message": "protocol.params.outputs",
    "ToolCall": "protocol.params.outputs",
    "TroupeError": "protocol.errors",
    "InvalidRequest": "protocol.errors",
    "ContextLengthExceeded": "protocol.errors",
    "EngineOverloaded": "protocol.errors",
    "EngineStopped": "protocol.errors",
    "RequestFailed": "protocol.errors",
    "ModelLoadError": "protocol.errors",
    "WeightsChanged": "protocol.errors",
    "WorkerCrashed": "protocol.errors",
    "GraphCaptureError": "protocol.errors",
    "RequestAborted": "protocol.errors",
    "AdapterError": "protocol.errors",
    "ConfigError": "protocol.errors",
    "ModelNotFound": "protocol.errors",
    "Conflict": "protocol.errors",
    "KVLoadFailed": "protocol.errors",
    "QueueTimeout": "protocol.errors",
    "RateLimited": "protocol.errors",
    "WrongEventLoop": "protocol.errors",
    "asgi": "server.app.app",
    "lifespan": "server.app.lifespan",
    **dict.fromkeys(
        (
            *("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"),
            *("ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
        ),
        "actors.llm.pooling_outputs",
    ),
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Vector"), "actors.metrics.metric_reader"),
    "EmbedsPrompt": "actors.admission.embeds_prompt",
    "RequestOutputKind": "protocol.params.output_kind",
    "ModelRegistry": "protocol.vllm.names",
    "initialize_ray_cluster": "protocol.vllm.names",
    "FlexibleArgumentParser": "server.vllm_api.argument_parser",
    "AsyncLLM": "server.vllm_api.async_engine",
    "AsyncLLMEngine": "server.vllm_api.async_engine",
    "AsyncEngineArgs": "server.vllm_api.engine_args",
    "EngineArgs": "server.vllm_api.engine_args",
    "LLMEngine": "server.vllm_api.llm_engine",
    "print_embeddings": "server.vllm_api.print_utils",
    **dict.fromkeys(
        ("BlockStore", "StoreContext", "StoreCorrupt", "StoreError", "StoreMiss", "StoreUse"), "models.kv_offload.store"
    ),
    "ConnectorContext": "models.kv_connectors.base",
    "BlockSignature": "models.kv_connectors.signed_block",
    **dict.fromkeys(("CallSyntax", "Channels", "OwnCall", "Thinking", "Written"), "models.chat_parsers.syntax"),
    "Matcher": "models.structured_outputs.backend",
    **dict.fromkeys(("LogitsProcessor", "ProcessedRow"), "models.sampling.logits_processors"),
    "Drafts": "models.batch.row_drafts",
    **dict.fromkeys(("Observation", "ProposalBatch", "Proposer", "RowDraws"), "models.proposers.base"),
    "AuxHiddenStates": "models.layers.aux_hidden_states",
    "ProposerContext": "models.proposers.registry",
    **dict.fromkeys(("EvictionPolicy", "TierFull"), "actors.kv_offload.eviction"),
    **dict.fromkeys(
        ("DecoderConfig", "ExpertNames", "LayerNorms", "LayerShape", "MoeConfig", "RopeConfig"),
        "models.config.decoder_config",
    ),
    **dict.fromkeys(("ConfigReader", "decoder_config"), "models.config.hf_config"),
    **dict.fromkeys(("QuantizationFormat", "QuantizedCheckpoint"), "models.quantization.checkpoint"),
    **dict.fromkeys(("Int8WeightOnly", "Outline", "QuantizedWeight"), "kernels.quantized_linear"),
    "SpeculativeConfig": "protocol.config.speculation",
    "NewRow": "protocol.messages.worker",
    "ProposerReport": "protocol.messages.proposer_report",
}

__all__ = [*sorted(_HOMES), "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Engine":  # importing it takes a third of a second, which a running event loop should not wait for
        return import_module(f"{__name__}.actors.engine.late_engine").engine_class()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
