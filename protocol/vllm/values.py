"""Values of vLLM's settings that say how this engine works anyway. They are accepted; all other values are refused.

One table for the command line, configuration files, `LLM`, `Engine` and `EngineArgs`.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from troupellm.protocol.errors import ConfigError
from troupellm.protocol.vllm.flags import REFUSED

logger = logging.getLogger("troupellm.config")

REMOTE_CODE: Final = "trust-remote-code"
_COMPILATION: Final = "compilation-config"
_BOTH = (False, True)

_ROWS: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((1,), """
        pipeline-parallel-size prefill-context-parallel-size
        decode-context-parallel-size data-parallel-size-local nnodes cp-kv-cache-interleave-size
        dcp-kv-cache-interleave-size renderer-num-workers max-num-partial-prefills max-long-partial-prefills
        prefill-schedule-interval num-scheduler-steps speculative-draft-tensor-parallel-size
        offload-num-in-group offload-prefetch-step
    """),
    ((0,), """
        data-parallel-start-rank node-rank swap-space cpu-offload-gb long-prefill-token-threshold
        scheduler-delay-factor watermark num-lookahead-slots tokenizer-pool-size offload-group-size ubatch-size
        num-redundant-experts prefix-cache-retention-interval mm-ipc-gpu-memory-gb optimization-level
        compilation-config mamba-cache-philox-rounds
    """),
    ((False,), """
        enable-expert-parallel trust-remote-code enable-log-requests enable-force-include-usage
        enable-per-request-metrics headless data-parallel-hybrid-lb data-parallel-external-lb
        data-parallel-multi-port-external-lb enable-ep-weight-filter enable-eplb eplb-log-balancedness
        enable-elastic-ep enable-fault-tolerance enable-dbo enable-microbatching enable-batch-sharded-sampling
        enable-hc-sp enable-shm-tensor-arena ray-workers-use-nsight worker-use-ray engine-use-ray dcp-q-replicate
        enable-nccl-comm-suspend numa-bind enable-mm-embeds trust-request-mm-kwargs mm-encoder-only
        interleave-mm-strings enable-mm-processor-stats enable-multimodal-encoder-data-parallel fully-sharded-loras
        enable-tower-connector-lora specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras
        enable-lora-bias enable-prompt-adapter skip-tokenizer-init allow-deprecated-quantization return-sampling-mask
        enable-return-routed-experts enable-trace-replay use-fp64-gumbel disable-sliding-window enable-prompt-embeds
        sleep-mode-offload-cudagraph enable-cumem-allocator long-prefill-token-threshold-adaptive
        multi-step-stream-outputs calculate-kv-scales kv-sharing-fast-prefill enable-mamba-shared-prefix-checkpoint
        use-replayssm enable-mamba-cache-stochastic-rounding monokernel enable-flashinfer-autotune
        disable-logprobs-during-spec-decoding enable-reasoning kv-cache-metrics cudagraph-metrics enable-mfu-metrics
        enable-layerwise-nvtx-tracing enable-logging-iteration-details jit-monitor-verbose enable-log-outputs
        return-tokens-as-token-ids chat-template-text-format enable-ssl-refresh tokens-only enable-scale-out
        enable-tokenizer-info-endpoint aggregate-engine-logging fail-on-environ-validation grpc
    """),
    ((True,), """
        exclude-tools-when-tool-choice-none disable-log-requests enable-prompt-tokens-details
        enable-server-load-tracking use-v2-block-manager guided-decoding-disable-fallback
        log-error-stack disable-cascade-attn disable-async-output-proc
    """),
    (_BOTH, """
        enable-sleep-mode use-tqdm-on-load disable-custom-all-reduce disable-nccl-for-dp-synchronization
        disable-mm-preprocessor-cache skip-mm-profiling disable-chunked-mm-input
        mm-device-do-normalize disable-image-processor enable-flash-late-interaction swa-bounded-replay
    """),
    (("auto",), """
        config-format offload-backend mm-processor-device mamba-cache-dtype mamba-ssm-cache-dtype
        moe-backend linear-backend chat-template-content-format gdn-prefill-backend kda-prefill-backend
        kda-decode-backend tool-strict-level
    """),
    (("mp", "uni"), "distributed-executor-backend"),
    (("mp",), "data-parallel-backend"),
    (("auto", "hf"), "tokenizer-mode"),
    (("auto", "generate"), "task"),
    (("assistant",), "response-role"),
    (("info",), "uvicorn-log-level"),
    (("balanced",), "performance-mode"),
    (("sha256",), "prefix-caching-hash-algo"),
    (("cpu",), "pt-load-map-location"),
    (("cumem",), "sleep-mode-backend"),
    (("none",), "per-request-spec-decode-metrics"),
    (("warn",), "jit-monitor-mode"),
    (("lazy",), "safetensors-load-strategy"),
    ((16,), "replayssm-buffer-len dp-sync-interval"),
    ((32,), "dbo-decode-token-threshold"),
    ((512,), "dbo-prefill-token-threshold"),
    ((29501,), "master-port"),
    ((29550,), "data-parallel-rpc-port"),
    ((4,), "mm-processor-cache-gb"),
    ((128,), "mm-shm-cache-max-object-size-mb"),
    ((0.01,), "kv-cache-metrics-sample"),
    (("lru",), "mm-processor-cache-type"),
    (("blake3",), "mm-hasher-algorithm"),
    (("weights",), "mm-encoder-tp-mode"),
    (("allgather_reducescatter",), "all2all-backend"),
    (("linear",), "expert-placement-strategy"),
)  # fmt: skip
ACCEPTED: Final[dict[str, tuple[Any, ...]]] = {name: values for values, names in _ROWS for name in names.split()}
"""By a flag's name without dashes, the values that change nothing. Of every flag, so is one that is not set."""
_UNSET: Final = ("", "none", "null", "{}", "[]", "()")


def is_switch(flag: str) -> bool:
    """Whether a flag of vLLM is on or off, so that it takes no word after it.

    Args:
        flag: without dashes.
    """
    return any(isinstance(value, bool) for value in ACCEPTED.get(flag, ()))


def check_refused(flag: str, value: Any, *, label: str) -> None:
    """Accept a setting of vLLM whose value says how this engine works anyway.

    Args:
        flag: a key of `REFUSED`.
        value: a Python value, or its text on a command line.
        label: the setting as its user spells it, for the error.

    Raises:
        ConfigError: the value asks for something else; the sentence says what to use.
    """
    if accepts(flag, value):
        return
    if flag == REMOTE_CODE and _text(value) in ("true", "1"):
        logger.warning("%s is ignored: %s", label, REFUSED[flag])
        return
    raise ConfigError(f"{label} is known from vLLM but not supported here: {REFUSED[flag]}", param=label)


def accepts(flag: str, value: Any) -> bool:
    """Whether the value says how this engine works anyway, or nothing."""
    text = _text(value)
    if text in _UNSET:
        return True
    if flag == _COMPILATION and (mode := _compilation_mode(value)) is not None:
        text = _text(mode).replace("none", "0")
    return any(text == _text(known) or _same_number(text, known) for known in ACCEPTED.get(flag, ()))


def _text(value: Any) -> str:
    return str(value).strip().lower()


def _same_number(text: str, known: Any) -> bool:
    if isinstance(known, bool):
        return text == str(int(known))
    try:
        return isinstance(known, int | float) and float(text) == known
    except ValueError:
        return False


def _compilation_mode(value: Any) -> Any:
    """The mode, where a compilation config says nothing else; None otherwise."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value if value.strip().lower() == "none" else None
    if isinstance(value, Mapping):
        return next(iter(value.values())) if len(value) == 1 and next(iter(value)) in ("mode", "level") else None
    return value
