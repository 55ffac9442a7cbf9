"""Flags that vLLM's users know: short spellings, and flags that mean nothing here."""

SHORT = {
    "-m": "--model",
    "-c": "--max-model-len",
    "-np": "--max-num-seqs",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-dc": "--diffusion-config",
    "-asc": "--api-server-count",
    "-sc": "--speculative-config",
}
"""Short spellings of vLLM and llama.cpp."""

_NAMES = {
    "one engine drives one device; run one server per device behind a balancer": """
        pipeline-parallel-size enable-expert-parallel
        distributed-executor-backend headless prefill-context-parallel-size decode-context-parallel-size
        data-parallel-size-local nnodes
    """,
    "remote code is never run; convert the model to a supported architecture": "trust-remote-code",
    "the tokenizer is read from tokenizer.json; use --tokenizer to name another folder": "tokenizer-mode",
    "preempted sequences go to host memory with --kv-offloading-size": "swap-space",
    "it is not there yet; use a smaller --dtype": "cpu-offload-gb",
    "nothing is compiled at start; leave it out": "compilation-config",
    "use --cudagraph-capture-sizes": "cuda-graph-sizes max-cudagraph-capture-size",
    "parsers are plug-ins of the entry point group troupellm.dialects": "tool-parser-plugin reasoning-parser-plugin",
    "tools that may not be called are never shown to the model; leave it out": "exclude-tools-when-tool-choice-none",
    "use --mm-processor-cache-bytes": "mm-processor-cache-gb",
    "images are taken without it; leave it out": """
        enable-mm-embeds media-io-kwargs trust-request-mm-kwargs mm-processor-cache-type
        mm-shm-cache-max-object-size-mb mm-hasher-algorithm mm-encoder-only mm-encoder-tp-mode mm-encoder-attn-backend
        mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin
        interleave-mm-strings skip-mm-profiling video-pruning-rate video-pruning-method mm-tensor-ipc
        mm-processor-device mm-ipc-gpu-memory-gb mm-device-do-normalize enable-mm-processor-stats
        disable-chunked-mm-input disable-mm-preprocessor-cache enable-multimodal-encoder-data-parallel
        allowed-local-media-path ec-transfer-config ec-manager-config image-input-type image-token-id image-input-shape
        image-feature-size image-processor disable-image-processor
    """,
    "use --max-model-len": "max-model-length",
    "use --max-num-batched-tokens to bound prefill per step": "max-num-partial-prefills",
    "the server is hypercorn; use --log-format and --disable-access-log": "uvicorn-log-level",
    "use --disable-access-log": "disable-uvicorn-access-log",
    "requests are never logged with their text; use --disable-access-log": "disable-log-requests",
    "requests are never logged with their text": "enable-log-requests max-log-len",
    "it is not there yet; scrape /metrics": "otlp-traces-endpoint enable-per-request-metrics",
    "sleeping needs no flag; the routes need --admin-api-key or --admin-uds": "enable-sleep-mode",
    "use --profile-dir": "profiler-config enable-layerwise-nvtx-tracing jit-monitor-mode jit-monitor-verbose",
    "results are written where they belong, and gone on with after an interruption; leave it out": "output-tmp-dir",
    "a batch has a progress bar; serve with --files-dir has /metrics": "enable-metrics",
    "use --kv-events, and read GET /kv_events": "kv-events-config",
    "use --runner, or --convert": "task",
    "use --pooler-config": "override-pooler-config",
    "a trial at load finds the form that the template reads; leave it out": "chat-template-content-format",
    "send chat_template_kwargs with the request": "default-chat-template-kwargs reasoning-effort-map",
    "the role is always assistant; leave it out": "response-role",
    "send stream_options.include_usage with the request": "enable-force-include-usage",
    "usage always has them; leave it out": "enable-prompt-tokens-details",
    "usage.completion_tokens_details has them; leave it out": "per-request-spec-decode-metrics",
    "probes are never logged; use --disable-access-log for the rest": "disable-access-log-for-endpoints",
    "HTTP is the only protocol": "grpc grpc-port",
    "mount troupellm.asgi(engine) in your own ASGI app": "middleware",
    "one engine drives one device, alone; leave it out": """
        cp-kv-cache-interleave-size dcp-kv-cache-interleave-size dcp-comm-backend dcp-q-replicate
        data-parallel-start-rank data-parallel-address data-parallel-rpc-port data-parallel-backend
        data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb
        data-parallel-supervisor-port dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
        dp-supervisor-probe-failure-threshold dp-sync-interval disable-nccl-for-dp-synchronization all2all-backend
        expert-placement-strategy enable-ep-weight-filter enable-eplb eplb-config num-redundant-experts eplb-window-size
        eplb-step-interval eplb-log-balancedness enable-elastic-ep elastic-ep-max-dp-size enable-fault-tolerance
        fault-tolerance-config enable-dbo ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold
        enable-microbatching enable-batch-sharded-sampling enable-hc-sp node-rank master-addr master-port
        cpu-distributed-timeout-seconds enable-shm-tensor-arena max-parallel-loading-workers
        ray-workers-use-nsight worker-use-ray engine-use-ray disable-custom-all-reduce enable-nccl-comm-suspend
        speculative-draft-tensor-parallel-size
    """,
    "the environment says which device; set CUDA_VISIBLE_DEVICES": "device-ids",
    "start it under numactl, or use --num-threads": "numa-bind numa-bind-nodes numa-bind-cpus",
    "an adapter is what its folder says; use --enable-lora, --max-loras and --max-lora-rank": """
        lora-target-modules fully-sharded-loras default-mm-loras enable-tower-connector-lora
        specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras max-lora-cls-labels
        lora-extra-vocab-size long-lora-scaling-factors enable-lora-bias qlora-adapter-name-or-path
    """,
    "prompt adapters are not served; LoRA adapters are, with --enable-lora": """
        enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token prompt-adapters
    """,
    "weights stay on the device; use --quantization or a smaller --dtype": """
        offload-backend cpu-offload-params offload-group-size offload-num-in-group offload-prefetch-step offload-params
    """,
    "only safetensors and GGUF files are read, and as they lie; leave it out": """
        safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size
        model-loader-extra-config ignore-patterns pt-load-map-location
    """,
    "progress is in the log and at /startupz; leave it out": "use-tqdm-on-load",
    "use --model": "model-weights",
    "the tokenizer is always read, and prompts may be token ids all the same; leave it out": "skip-tokenizer-init",
    "use --tokenizer to name another folder": "tokenizer-revision",
    "remote code is never run; leave it out": "code-revision",
    "a model is what its config.json says; change that in a copy of its folder": """
        hf-config-path config-format hf-overrides model-class-overrides rope-scaling rope-theta
    """,
    "use --quantization; what a quantized checkpoint needs stands in its files": """
        quantization-config quantization-param-path allow-deprecated-quantization
    """,
    "answers do not carry it; leave it out": """
        return-sampling-mask enable-return-routed-experts aux-output-config enable-trace-replay
    """,
    "how random numbers are made is no setting; use --seed": "use-fp64-gumbel",
    "windows are as the model has them; use --max-model-len to stay within one": "disable-sliding-window",
    "only programs that embed the engine may give embeddings: Engine.generate(prompt_embeds=array)": """
        enable-prompt-embeds
    """,
    "sleeping needs no setting; the routes need --admin-api-key or --admin-uds": """
        sleep-mode-backend sleep-mode-offload-cudagraph sleep-preserve-parameter-names enable-cumem-allocator
    """,
    "/pooling takes its inputs as they are; leave it out": "io-processor-plugin",
    "use --api-server-count for processes that prepare prompts": """
        renderer-num-workers tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config
    """,
    "whether the model has a process of its own is said by --worker-process": "disable-frontend-multiprocessing",
    "use --max-num-batched-tokens": "max-num-scheduled-tokens",
    "use --max-num-seqs": "max-num-active-seqs",
    "use --max-num-prefill-tokens, or --itl-target-ms for streams beside prompts": """
        long-prefill-token-threshold long-prefill-token-threshold-adaptive max-long-partial-prefills
        prefill-schedule-interval scheduler-delay-factor
    """,
    "how many blocks stay free is decided while it runs; leave it out": "scheduler-reserve-full-isl watermark",
    "the parts of the engine cannot be replaced; --logits-processors are plug-ins": """
        scheduler-cls worker-cls worker-extension-cls logits-processor-pattern
    """,
    "whether a step is planned while one runs is said by --async-scheduling": """
        num-scheduler-steps multi-step-stream-outputs disable-async-output-proc
    """,
    "the scheduler needs no such setting; leave it out": "num-lookahead-slots use-v2-block-manager",
    "the whole cache has the --kv-cache-dtype; leave it out": "kv-cache-dtype-skip-layers calculate-kv-scales",
    "blocks are known by a keyed SHA-256; leave it out": "prefix-caching-hash-algo",
    "what is kept of a prefix is whole blocks; use --enable-prefix-caching and --block-size": """
        prefix-match-unit prefix-cache-retention-interval kv-sharing-fast-prefill swa-bounded-replay
    """,
    "blocks stay small beside states; use --state-snapshot-interval": """
        mamba-block-size mamba-cache-mode enable-mamba-shared-prefix-checkpoint
    """,
    "states have the model's dtype, or float32 where its layers need that; leave it out": """
        mamba-cache-dtype mamba-ssm-cache-dtype
    """,
    "states of sequences need no such setting; leave it out": """
        use-replayssm replayssm-buffer-len mamba-config mamba-backend mamba-ssu-algorithm
        enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds gdn-prefill-backend kda-prefill-backend
        kda-decode-backend
    """,
    "nothing is compiled at start; --enforce-eager does without CUDA graphs": """
        optimization-level performance-mode max-seq-len-to-capture max-context-len-to-capture
    """,
    "use --attention-backend": "attention-config",
    "attention to a shared prefix is not computed apart; leave it out": "disable-cascade-attn",
    "kernels are chosen for the device; --attention-backend is the one that has a flag": """
        kernel-config ir-op-priority moe-backend linear-backend sparse-indexer-topk-backend enable-flashinfer-autotune
        monokernel
    """,
    "use --speculative-config": """
        spec-method spec-model spec-tokens speculative-model speculative-model-quantization num-speculative-tokens
        speculative-max-model-len speculative-disable-by-batch-size speculative-disable-mqa-scorer
        ngram-prompt-lookup-max ngram-prompt-lookup-min spec-decoding-acceptance-method
        typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha
        disable-logprobs-during-spec-decoding
    """,
    "use --reasoning-parser": "reasoning-config enable-reasoning",
    "no guide is ever handed to another backend; leave it out": "guided-decoding-disable-fallback",
    "weights cannot be exchanged while it serves; start another server": "weight-transfer-config",
    "such models are not served; leave it out": "diffusion-config engram-config",
    "texts get no watermark; leave it out": "watermark-config",
    "there is one engine and one log; leave it out": "aggregate-engine-logging",
    "use --metrics-compat": "show-hidden-metrics-for-version",
    "/metrics has all that there is; leave it out": """
        collect-detailed-traces kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-mfu-metrics
        custom-histogram-buckets enable-logging-iteration-details
    """,
    "use --log-format and --log-level": "logging-config log-config-file",
    "use --watchdog-timeout": "watchdog-config",
    "every setting is checked, and no platform has further ones; leave it out": """
        additional-config override-neuron-config fail-on-environ-validation
    """,
    "answers are never logged; leave it out": "enable-log-outputs enable-log-deltas",
    "internal errors are always logged with their traceback; leave it out": "log-error-stack",
    "send return_tokens_as_token_ids with the request": "return-tokens-as-token-ids",
    "system_fingerprint tells version, model and number formats; leave it out": "fingerprint-mode fingerprint-value",
    "send thinking with the request": "anthropic-disabled-thinking-effort",
    "Cohere's chat API is not served; use /v1/chat/completions": "cohere-format cohere-is-reasoning-model",
    "templates are given text; leave it out": "chat-template-text-format",
    "send strict with each tool": "tool-strict-level",
    "tools are run by whoever asked; leave it out": "tool-server",
    "clients must show a certificate where there is --ssl-ca-certs; leave it out": "ssl-cert-reqs",
    "the ciphers are those that Python chooses; leave it out": "ssl-ciphers",
    "restart after a certificate has changed; --shutdown-timeout lets streams finish": "enable-ssl-refresh",
    "a request's head has a fixed bound; --max-body-bytes is that of its body": """
        h11-max-incomplete-event-size h11-max-header-count
    """,
    "the usual routes take and give token ids; leave it out": "tokens-only enable-scale-out",
    "the files are in the model's folder; /tokenize and /detokenize use them": "enable-tokenizer-info-endpoint",
    "/load is always there; leave it out": "enable-server-load-tracking",
    "/docs needs nothing from elsewhere; leave it out": "disable-fastapi-docs enable-offline-docs",
    "models that compare token by token are not served; leave it out": "enable-flash-late-interaction",
}
"""By the sentence that says what to use instead: the flags, without dashes."""
REFUSED = {name: sentence for sentence, names in _NAMES.items() for name in names.split()}
"""All flags of vLLM that are refused by name, each with its sentence."""
